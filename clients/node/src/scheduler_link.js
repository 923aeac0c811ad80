/** The scheduler, seen from a client: registration, heartbeats, views, tables. */

import { randomBytes } from 'node:crypto';

import {
  Backoff, LONGEST_WAIT_MS, callOnce, callUntil, expireAfter, openClient, pause,
} from './calls.js';
import { SchedulerService } from './contract.js';
import { PushpullError, errorFromCall } from './errors.js';
import { joinProof, joinSecret } from './join_secret.js';

const PROTOCOL_VERSION = 1;
const CALL_MS = 5000;
/** How long whoever ends in the middle of its work waits for the answer to that. */
const ABANDON_MS = 1000;

/** A registered node's link. It keeps the newest view, and says that the node lives. */
export class SchedulerLink {
  #addresses;
  #current = 0;
  /** @type {any} */
  #client;
  #closing = new AbortController();
  /** @type {any} */
  #watch = null;
  /** @type {Set<{look: () => void, fail: (error: PushpullError) => void}>} */
  #viewWaiters = new Set();
  /** The identity to send. @type {any} */
  session = null;
  workerCount = 0;
  heartbeatIntervalMs = 1000;
  /** The newest view. @type {any} */
  view = null;
  /** @type {(view: any) => void} */
  onView = () => {};
  /** This node may not go on. @type {(error: PushpullError) => void} */
  onLost = () => {};
  /** What heartbeats say. @type {() => object} */
  progress = () => ({});

  /** @param {string} addresses host:port, or several with commas between them */
  constructor(addresses) {
    this.#addresses = addresses.split(',').map((address) => address.trim()).filter(Boolean);
    if (!this.#addresses.length) {
      throw new PushpullError('INVALID_CONFIG', "no scheduler address; expected 'host:port'");
    }
    this.#client = openClient(SchedulerService, this.#addresses[0]);
  }

  /** Aborted when the link is closed, with the error that it was closed with. */
  get signal() {
    return this.#closing.signal;
  }

  /**
   * Registers, and starts heartbeats and the watch of views.
   *
   * @param {{role: string, rank?: number, deadlineMs: number}} options
   */
  async register({ role, rank, deadlineMs }) {
    const request = {
      registrationId: randomBytes(16),
      role,
      protocolVersion: PROTOCOL_VERSION,
      ...(rank === undefined ? {} : { requestedRank: rank }),
    };
    const response = await this.#registered(request, deadlineMs);
    this.session = response.session;
    this.workerCount = response.workerCount;
    this.heartbeatIntervalMs = response.heartbeatIntervalMs;
    void this.#beat();
    void this.#watchViews();
    await this.viewAtLeast(1, deadlineMs);
  }

  /**
   * Each attempt proves the join secret over the challenge of the scheduler that it goes to.
   *
   * @param {any} request
   * @param {number} deadlineMs
   */
  #registered(request, deadlineMs) {
    const secret = joinSecret();
    const role = request.role.replace('NODE_ROLE_', '').toLowerCase();
    return this.#attempted(
      'RegisterNode',
      async (timeoutMs) => {
        const client = this.#client;
        const { challenge } = await callOnce(client, 'GetJoinChallenge', {}, timeoutMs, this.signal);
        const proof = secret && { joinProof: joinProof(secret, challenge, { ...request, role }) };
        const proven = { ...request, ...proof };
        return callOnce(client, 'RegisterNode', proven, timeoutMs, this.signal);
      },
      deadlineMs,
    );
  }

  /**
   * @param {string} method
   * @param {object} request
   * @param {number} deadlineMs
   * @param {number} [attemptMs]
   */
  #call(method, request, deadlineMs, attemptMs) {
    const once = (/** @type {number} */ timeoutMs) =>
      callOnce(this.#client, method, request, timeoutMs, this.signal);
    return this.#attempted(method, once, deadlineMs, attemptMs);
  }

  /**
   * @param {string} method
   * @param {(timeoutMs: number) => Promise<any>} once
   * @param {number} deadlineMs
   * @param {number} [attemptMs]
   */
  #attempted(method, once, deadlineMs, attemptMs) {
    const attempt = async (/** @type {number} */ timeoutMs) => {
      try {
        return await once(timeoutMs);
      } catch (failure) {
        if (errorFromCall(failure).isFromGrpc) this.#tryNextAddress();
        throw failure;
      }
    };
    const what = `${method} at the scheduler (${this.#addresses.join(', ')})`;
    return callUntil(attempt, { deadlineMs, signal: this.signal, what, attemptMs });
  }

  #tryNextAddress() {
    if (this.signal.aborted || this.#addresses.length === 1) return;
    this.#client.close();
    this.#current = (this.#current + 1) % this.#addresses.length;
    this.#client = openClient(SchedulerService, this.#addresses[this.#current]);
  }

  async #beat() {
    while (!this.signal.aborted) {
      try {
        const { session, view } = this;
        const request = { session, progress: this.progress(), viewNumber: view?.viewNumber ?? 0 };
        await callOnce(this.#client, 'Heartbeat', request, CALL_MS);
      } catch (failure) {
        const error = errorFromCall(failure);
        if (['FENCED', 'UNAUTHENTICATED'].includes(error.code)) this.#lost(error);
        if (error.isFromGrpc) this.#tryNextAddress();
      }
      await pause(this.heartbeatIntervalMs, this.signal).catch(() => {});
    }
  }

  /** @param {PushpullError} error */
  #lost(error) {
    if (!this.signal.aborted) this.onLost(error);
  }

  async #watchViews() {
    const backoff = new Backoff(this.signal);
    while (!this.signal.aborted) {
      await new Promise((resolve) => {
        const watch = this.#watch = this.#client.WatchCluster({ session: this.session });
        watch.on('data', (/** @type {any} */ { view }) => {
          backoff.reset();
          this.#observe(view);
        });
        watch.on('error', (/** @type {unknown} */ failure) => {
          const error = errorFromCall(failure);
          if (error.code === 'FENCED') this.#lost(error);
          resolve(undefined);
        });
        watch.on('end', resolve);
      });
      await backoff.wait().catch(() => {});
    }
  }

  /** @param {any} view */
  #observe(view) {
    if (this.view && view.viewNumber <= this.view.viewNumber) return;
    this.view = view;
    this.onView(view);
    for (const { look } of [...this.#viewWaiters]) look();
  }

  /**
   * Waits until the view has at least this number.
   *
   * @param {number} viewNumber
   * @param {number} deadlineMs
   */
  viewAtLeast(viewNumber, deadlineMs) {
    const what = `view ${viewNumber} (the newest is ${this.view?.viewNumber ?? 'none'})`;
    return this.viewWhere((view) => view.viewNumber >= viewNumber, deadlineMs, what);
  }

  /**
   * Waits until the view is as wanted; rejects with the error that ends the waits or the link.
   *
   * @param {(view: any) => boolean} isWanted
   * @param {number} deadlineMs
   * @param {string} what for the error
   * @returns {Promise<any>} the view
   */
  viewWhere(isWanted, deadlineMs, what) {
    return new Promise((resolve, reject) => {
      const finish = () => {
        clearTimeout(timer);
        this.#viewWaiters.delete(waiter);
      };
      const waiter = {
        look: () => {
          if (!this.view || !isWanted(this.view)) return;
          finish();
          resolve(this.view);
        },
        fail: (/** @type {PushpullError} */ error) => {
          finish();
          reject(error);
        },
      };
      const expire = () =>
        waiter.fail(new PushpullError('WAIT_EXPIRED', `no ${what} within ${deadlineMs} ms`));
      const timer = expireAfter(expire, deadlineMs);
      this.#viewWaiters.add(waiter);
      waiter.look();
      if (this.signal.aborted) waiter.fail(this.signal.reason);
    });
  }

  /**
   * Creates a table, or finds the identical one; returns when the view holds it.
   *
   * @param {object} spec a pushpull.v1.TableSpec
   * @param {number} deadlineMs
   * @returns {Promise<any>} a pushpull.v1.Table
   */
  async createTable(spec, deadlineMs) {
    const endMs = Date.now() + deadlineMs;
    const request = { session: this.session, spec };
    const attemptMs = Math.min(deadlineMs, LONGEST_WAIT_MS);
    const answer = await this.#call('CreateTable', request, deadlineMs, attemptMs);
    await this.viewAtLeast(answer.viewNumber, Math.max(endMs - Date.now(), CALL_MS));
    return answer.table;
  }

  /** @param {string} reason */
  async deregister(reason) {
    await this.#call('DeregisterNode', { session: this.session, reason }, CALL_MS);
  }

  /**
   * Ends the waits for views that are under way.
   *
   * @param {PushpullError} error
   */
  endWaits(error) {
    for (const { fail } of [...this.#viewWaiters]) fail(error);
  }

  /**
   * Ends in the middle of the work, and tells the scheduler: another may take this worker's rank.
   *
   * @param {PushpullError} error what calls under way reject with
   */
  async abandon(error) {
    if (this.signal.aborted) return;
    this.#end(error);
    const { session } = this;
    if (session) {
      const request = { session, reason: error.message, unfinished: true };
      await callOnce(this.#client, 'DeregisterNode', request, ABANDON_MS).catch(() => {});
    }
    this.#client.close();
  }

  /** @param {PushpullError} error what calls under way reject with */
  close(error) {
    if (this.signal.aborted) return;
    this.#end(error);
    this.#client.close();
  }

  /** @param {PushpullError} error */
  #end(error) {
    this.#closing.abort(error);
    this.endWaits(error);
    this.#watch?.cancel();
  }
}
