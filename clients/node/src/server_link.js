/** One server, seen from a client: a session, one long push stream, pulls. */

import { callOnce, callUntil, openClient } from './calls.js';
import { ParameterService } from './contract.js';
import { PushpullError, errorFromCall } from './errors.js';

const SESSION_MS = 10000;
const MARGIN_MS = 5000;

/**
 * A server's link. It opens the push stream when first asked, and again whenever it breaks.
 *
 * Whoever answers at the address is that server only where its OpenSession says so; anything else
 * means that nobody is there (docs/reference/PROTOCOL.md, "Who answers"). So an error that no retry
 * mends counts once the server has said who it is after it.
 */
export class ServerLink {
  #client;
  #node;
  #session;
  #closing = new AbortController();
  /** @type {any} */
  #stream = null;
  #isOpening = false;
  /** The newest view for which the server knows this session. */
  #knownView = 0;
  /** What ended the last stream, if no retry mends it. @type {PushpullError | null} */
  #refusal = null;
  /** Why the server cannot be reached; empty if it can. */
  trouble = '';
  /** @type {() => void} */
  onOpen = () => {};
  /** @type {() => void} */
  onBroken = () => {};
  /** @type {(replies: any[]) => void} */
  onReplies = () => {};
  /** @type {(error: PushpullError) => void} */
  onLost = () => {};

  /**
   * @param {{nodeId: number, incarnation: number, address: string}} node as the view has it
   * @param {{clusterId: string}} session this client's
   */
  constructor(node, session) {
    this.#client = openClient(ParameterService, node.address);
    this.#node = node;
    this.#session = session;
  }

  /**
   * Whether it is the link of this node of a view.
   *
   * @param {{incarnation: number, address: string} | undefined} node
   */
  isOf(node) {
    return node?.incarnation === this.#node.incarnation && node.address === this.#node.address;
  }

  get #isClosed() {
    return this.#closing.signal.aborted;
  }

  get #name() {
    return `server ${this.#node.nodeId} (${this.#node.address})`;
  }

  /**
   * Makes the server know this session and what the view says. Returns if it is closed, too.
   *
   * @param {number} viewNumber
   * @param {number} deadlineMs
   */
  async openSession(viewNumber, deadlineMs) {
    if (this.#knownView >= viewNumber) return;
    const attempt = (/** @type {number} */ timeoutMs) => this.#greet(viewNumber, timeoutMs);
    const what = `OpenSession at ${this.#name}`;
    const { signal } = this.#closing;
    try {
      await callUntil(attempt, { deadlineMs, signal, what, attemptMs: SESSION_MS + MARGIN_MS });
    } catch (failure) {
      if (!this.#isClosed) throw failure;
    }
  }

  /**
   * Asks once who is there. RECOVERING: not the server, whatever it said.
   *
   * @param {number} viewNumber
   * @param {number} timeoutMs
   */
  async #greet(viewNumber, timeoutMs) {
    const request = { session: this.#session, viewNumber, deadlineMs: SESSION_MS };
    try {
      const { signal } = this.#closing;
      this.#compare(await callOnce(this.#client, 'OpenSession', request, timeoutMs, signal));
      this.#knownView = viewNumber;
      this.trouble = '';
    } catch (failure) {
      const { message, retryAfterMs } = errorFromCall(failure);
      this.#knownView = 0;
      this.#refusal = null; // a stranger's
      this.trouble = `${this.#name} cannot be reached: ${message}`;
      throw new PushpullError('RECOVERING', message, { retryAfterMs });
    }
  }

  /** @param {{clusterId: string, nodeId: number, incarnation: number}} answer */
  #compare({ clusterId, nodeId, incarnation }) {
    const isOurs = clusterId === this.#session.clusterId;
    if (isOurs && nodeId === this.#node.nodeId && incarnation === this.#node.incarnation) return;
    const who = `server ${nodeId} (incarnation ${incarnation}) of cluster '${clusterId}'`;
    throw new PushpullError('RECOVERING', `${who} answers there`);
  }

  /**
   * Opens the push stream unless it is open; `onOpen` says when.
   *
   * @param {number} viewNumber
   */
  async openPushStream(viewNumber) {
    if (this.#stream || this.#isOpening || this.#isClosed) return;
    this.#isOpening = true;
    try {
      await this.openSession(viewNumber, Infinity);
      if (this.#isClosed) return;
      if (this.#refusal) this.onLost(this.#refusal);
      else this.#start();
    } finally {
      this.#isOpening = false;
    }
  }

  #start() {
    const stream = this.#stream = this.#client.Push();
    stream.on('data', (/** @type {any} */ { replies }) => this.onReplies(replies));
    stream.on('error', (/** @type {unknown} */ failure) => {
      this.#broken(stream, errorFromCall(failure));
    });
    stream.on('end', () => this.#broken(stream, null));
    stream.write({ header: { session: this.#session, receiverNodeId: this.#node.nodeId } });
    this.onOpen();
  }

  /**
   * @param {any} stream
   * @param {PushpullError | null} error
   */
  #broken(stream, error) {
    if (this.#stream !== stream) return;
    this.#stream = null;
    this.#knownView = 0;
    if (this.#isClosed) return;
    this.#refusal = error && !error.isRetryable && !error.isFromGrpc ? error : null;
    this.onBroken();
  }

  /** @param {object} request a PushRequest; the stream must be open */
  push(request) {
    this.#stream.write(request);
  }

  /**
   * Pulls; calls `onPart` for each part of the answer.
   *
   * @param {object} request a PullRequest without session
   * @param {number} deadlineMs
   * @param {(part: any) => void} onPart
   */
  async pull(request, deadlineMs, onPart) {
    const viewNumber = this.#knownView;
    try {
      await this.#pulled(request, deadlineMs, onPart);
    } catch (failure) {
      const error = errorFromCall(failure);
      const isPassing = error.isRetryable || error.code === 'WAIT_EXPIRED';
      if (!isPassing) await this.#greet(viewNumber, SESSION_MS);
      throw error;
    }
  }

  /**
   * @param {object} request
   * @param {number} deadlineMs
   * @param {(part: any) => void} onPart
   * @returns {Promise<void>}
   */
  #pulled(request, deadlineMs, onPart) {
    return new Promise((resolve, reject) => {
      const call = this.#client.Pull(
        { ...request, session: this.#session, deadlineMs },
        { deadline: Date.now() + deadlineMs + MARGIN_MS },
      );
      call.on('data', (/** @type {any} */ part) => {
        try {
          onPart(part);
        } catch (failure) {
          reject(failure);
          call.cancel();
        }
      });
      const { signal } = this.#closing;
      const cancel = () => call.cancel();
      signal.addEventListener('abort', cancel);
      call.on('error', reject);
      call.on('end', resolve);
      call.on('status', () => signal.removeEventListener('abort', cancel));
    });
  }

  close() {
    this.#closing.abort();
    this.#stream?.cancel();
    this.#client.close();
  }
}
