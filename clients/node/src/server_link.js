/** One server, seen from a client: a session, one long push stream, pulls. */

import { Backoff, callOnce, callUntil, openClient } from './calls.js';
import { ParameterService } from './contract.js';
import { errorFromCall } from './errors.js';

const SESSION_MS = 10000;
const MARGIN_MS = 5000;

/** @typedef {import('./errors.js').PushpullError} PushpullError */

/** A server's link. It opens the push stream when first asked, and again whenever it breaks. */
export class ServerLink {
  #client;
  #session;
  #signal;
  /** @type {any} */
  #stream = null;
  #isOpening = false;
  #isClosed = false;
  /** The newest view for which the server knows this session. */
  #knownView = 0;
  /** @type {() => void} */
  onOpen = () => {};
  /** @type {() => void} */
  onBroken = () => {};
  /** @type {(replies: any[]) => void} */
  onReplies = () => {};
  /** @type {(error: PushpullError) => void} */
  onLost = () => {};

  /**
   * @param {string} address host:port
   * @param {{session: object, signal: AbortSignal}} options
   */
  constructor(address, { session, signal }) {
    this.#client = openClient(ParameterService, address);
    this.address = address;
    this.#session = session;
    this.#signal = signal;
  }

  /**
   * Makes the server know this session and what the view says.
   *
   * @param {number} viewNumber
   * @param {number} deadlineMs
   */
  async openSession(viewNumber, deadlineMs) {
    if (this.#knownView >= viewNumber) return;
    const request = { session: this.#session, viewNumber, deadlineMs: SESSION_MS };
    await callUntil(
      (timeoutMs) => callOnce(this.#client, 'OpenSession', request, timeoutMs),
      {
        deadlineMs,
        signal: this.#signal,
        what: `OpenSession at server ${this.address}`,
        attemptMs: SESSION_MS + MARGIN_MS,
      },
    );
    this.#knownView = viewNumber;
  }

  /**
   * Opens the push stream unless it is open; `onOpen` says when.
   *
   * @param {number} viewNumber
   */
  async openPushStream(viewNumber) {
    if (this.#stream || this.#isOpening || this.#isClosed) return;
    this.#isOpening = true;
    const backoff = new Backoff(this.#signal);
    try {
      while (!this.#stream && !this.#isClosed) {
        try {
          await this.openSession(viewNumber, SESSION_MS);
          this.#start();
        } catch (failure) {
          const error = errorFromCall(failure);
          if (!error.isRetryable && error.code !== 'WAIT_EXPIRED') {
            if (!this.#signal.aborted) this.onLost(error);
            return;
          }
          await backoff.wait(error.retryAfterMs);
        }
      }
    } catch (failure) {
      if (!this.#signal.aborted) throw failure;
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
    stream.write({ header: { session: this.#session } });
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
    if (this.#isClosed || this.#signal.aborted) return;
    if (error && !error.isRetryable && !error.isFromGrpc) this.onLost(error);
    else this.onBroken();
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
   * @returns {Promise<void>}
   */
  pull(request, deadlineMs, onPart) {
    return new Promise((resolve, reject) => {
      const call = this.#client.Pull(
        { ...request, session: this.#session, deadlineMs },
        { deadline: Date.now() + deadlineMs + MARGIN_MS },
      );
      call.on('data', onPart);
      call.on('error', (/** @type {unknown} */ failure) => reject(errorFromCall(failure)));
      call.on('end', resolve);
    });
  }

  close() {
    this.#isClosed = true;
    this.#stream?.cancel();
    this.#client.close();
  }
}
