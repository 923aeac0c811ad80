/** Errors: one class, told apart by the code of the catalogue (docs/reference/PROTOCOL.md, "Errors"). */

import grpc from '@grpc/grpc-js';

import { messageType } from './contract.js';

const ERROR_KEY = 'pushpull-error-bin';
const WAITS_FOR_A_VIEW = new Set(['STALE_ASSIGNMENT', 'NOT_OWNER']);
const RETRYABLE = new Set([...WAITS_FOR_A_VIEW, 'RECOVERING', 'DRAINING', 'OVERLOADED']);

/** What gRPC itself reports, without an error of ours. @type {Record<number, string>} */
const CODE_OF_STATUS = {
  [grpc.status.UNAVAILABLE]: 'RECOVERING',
  // A server that stops ends so what is still under way.
  [grpc.status.CANCELLED]: 'RECOVERING',
  [grpc.status.DEADLINE_EXCEEDED]: 'WAIT_EXPIRED',
  [grpc.status.RESOURCE_EXHAUSTED]: 'OVERLOADED',
  [grpc.status.UNAUTHENTICATED]: 'UNAUTHENTICATED',
};

/** An error of the catalogue. */
export class PushpullError extends Error {
  /**
   * @param {string} code as in pushpull.v1.ErrorCode, without its prefix
   * @param {string} message what came and what was expected
   * @param {{retryAfterMs?: number, clock?: number, isFromGrpc?: boolean}} [details]
   */
  constructor(code, message, { retryAfterMs = 0, clock = 0, isFromGrpc = false } = {}) {
    super(message);
    this.name = 'PushpullError';
    this.code = code;
    this.retryAfterMs = retryAfterMs;
    /** With ALREADY_PAST: where the range is. */
    this.clock = clock;
    /** No server of ours said it: the connection did. */
    this.isFromGrpc = isFromGrpc;
  }

  /** Whether the same request may succeed later. */
  get isRetryable() {
    return RETRYABLE.has(this.code);
  }

  /** Whether a newer view is needed first. */
  get waitsForView() {
    return WAITS_FOR_A_VIEW.has(this.code);
  }
}

/**
 * The error that a reply carries.
 *
 * @param {any} message a pushpull.v1.Error
 * @returns {PushpullError}
 */
export function errorFromMessage(message) {
  if (!message) return new PushpullError('INTERNAL', 'a reply lacks the error that it announces');
  const code = message.code.replace('ERROR_CODE_', '');
  const { retryAfterMs, clock } = message;
  return new PushpullError(code, message.message, { retryAfterMs, clock });
}

/**
 * The error of a call that failed as a whole.
 *
 * @param {unknown} failure what @grpc/grpc-js gave
 * @returns {PushpullError}
 */
export function errorFromCall(failure) {
  if (failure instanceof PushpullError) return failure;
  const error = /** @type {grpc.ServiceError} */ (failure);
  const [detail] = error.metadata?.get(ERROR_KEY) ?? [];
  if (Buffer.isBuffer(detail)) return errorFromMessage(messageType('Error').deserialize(detail));
  const code = CODE_OF_STATUS[error.code] ?? 'INTERNAL';
  return new PushpullError(code, error.message, { isFromGrpc: true });
}
