/** Calls with deadlines and retries (docs/reference/PROTOCOL.md, "Conventions"). */

import { setTimeout as sleep } from 'node:timers/promises';

import grpc from '@grpc/grpc-js';

import { PushpullError, errorFromCall } from './errors.js';

const FIRST_RETRY_MS = 100;
const LAST_RETRY_MS = 2000;
const ATTEMPT_MS = 5000;
/** Longer delays end a timer of Node's at once. */
const LONGEST_TIMER_MS = 2 ** 31 - 1;
/** The longest wait that a request may ask for. */
export const LONGEST_WAIT_MS = 3600000;

export const CHANNEL_OPTIONS = {
  // Who comes back at another IP address, under its name, is found within a second or two.
  'grpc.dns_min_time_between_resolutions_ms': 1000,
  'grpc.enable_http_proxy': 0,
  'grpc.keepalive_time_ms': 10000,
  'grpc.keepalive_timeout_ms': 5000,
  'grpc.max_receive_message_length': 4 * 1024 * 1024 + 64 * 1024,
  'grpc.max_reconnect_backoff_ms': 1000,
};

/**
 * One unary call.
 *
 * @param {any} client a gRPC client
 * @param {string} method
 * @param {object} request
 * @param {number} timeoutMs
 * @param {AbortSignal} [signal] ends the call
 * @returns {Promise<any>} rejects with a PushpullError
 */
export function callOnce(client, method, request, timeoutMs, signal) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + timeoutMs;
    const cancel = () => call.cancel();
    /** @type {(failure: unknown, response: any) => void} */
    const answer = (failure, response) => {
      signal?.removeEventListener('abort', cancel);
      if (failure) reject(errorFromCall(failure));
      else resolve(response);
    };
    const call = client[method](request, { deadline }, answer);
    signal?.addEventListener('abort', cancel);
  });
}

/**
 * Calls `expire` at the end of a deadline, but not of one that no timer reaches, such as Infinity.
 *
 * @param {() => void} expire
 * @param {number} deadlineMs from now
 * @returns {NodeJS.Timeout | undefined} for clearTimeout
 */
export function expireAfter(expire, deadlineMs) {
  return deadlineMs > LONGEST_TIMER_MS ? undefined : setTimeout(expire, deadlineMs);
}

/**
 * Waits.
 *
 * @param {number} waitMs
 * @param {AbortSignal} signal whose reason it rejects with, a PushpullError
 */
export async function pause(waitMs, signal) {
  await sleep(waitMs, undefined, { signal }).catch(() => {});
  signal.throwIfAborted();
}

/** Random waits whose bound doubles (full jitter), until a deadline or an abort. */
export class Backoff {
  #boundMs = FIRST_RETRY_MS;

  /** @param {AbortSignal} signal ends the waits, as in `pause` */
  constructor(signal) {
    this.signal = signal;
  }

  /** Whatever was waited for works again. */
  reset() {
    this.#boundMs = FIRST_RETRY_MS;
  }

  /** @param {number} [retryAfterMs] what the error asked for */
  async wait(retryAfterMs = 0) {
    const waitMs = retryAfterMs || Math.random() * this.#boundMs;
    this.#boundMs = Math.min(2 * this.#boundMs, LAST_RETRY_MS);
    await pause(waitMs, this.signal);
  }
}

/**
 * Calls until it works, the deadline has passed, the signal is aborted with an error, or one comes
 * that a retry does not mend.
 *
 * @template T
 * @param {(timeoutMs: number) => Promise<T>} attempt one call
 * @param {{deadlineMs: number, signal: AbortSignal, what: string, attemptMs?: number}} options
 *   `deadlineMs` from now; a single attempt has `attemptMs` of it
 * @returns {Promise<T>}
 */
export async function callUntil(attempt, { deadlineMs, signal, what, attemptMs = ATTEMPT_MS }) {
  const endMs = Date.now() + deadlineMs;
  const backoff = new Backoff(signal);
  for (;;) {
    try {
      return await attempt(Math.min(attemptMs, endMs - Date.now()));
    } catch (failure) {
      signal.throwIfAborted();
      const error = errorFromCall(failure);
      const mayRetry = error.isRetryable || (error.isFromGrpc && error.code === 'WAIT_EXPIRED');
      if (!mayRetry) throw error;
      if (Date.now() >= endMs) {
        const waited = `${what}: no answer in ${deadlineMs} ms`;
        throw new PushpullError('WAIT_EXPIRED', `${waited}: ${error.message}`);
      }
      await backoff.wait(error.retryAfterMs);
    }
  }
}

/**
 * A plaintext channel's client.
 *
 * @param {any} Service one of the contract's
 * @param {string} address host:port
 */
export function openClient(Service, address) {
  return new Service(address, grpc.credentials.createInsecure(), CHANNEL_OPTIONS);
}
