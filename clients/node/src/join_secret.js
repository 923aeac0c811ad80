/** The join secret: where it is, and the proof of it (docs/reference/PROTOCOL.md, "The join secret"). */

import { createHmac } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { homedir } from 'node:os';
import { join } from 'node:path';

import { PushpullError } from './errors.js';

/**
 * The secret: PUSHPULL_JOIN_SECRET, else the file PUSHPULL_JOIN_SECRET_FILE, else the user's own.
 *
 * @returns {string} empty if there is none
 */
export function joinSecret() {
  const { PUSHPULL_JOIN_SECRET: given, PUSHPULL_JOIN_SECRET_FILE: named } = process.env;
  if (given) return given.trim();
  try {
    return readFileSync(named || join(homedir(), '.pushpull', 'join-secret'), 'utf8').trim();
  } catch (failure) {
    if (!named) return '';
    throw new PushpullError('INVALID_CONFIG', `the join secret in ${named} cannot be read`);
  }
}

/**
 * @param {string | Uint8Array} secret
 * @param {Uint8Array} challenge the scheduler's
 * @param {{registrationId: Uint8Array, role: string, requestedRank?: number, address?: string}} who
 *   `role` in lower case: "worker"
 */
export function joinProof(secret, challenge, { registrationId, role, requestedRank, address }) {
  const hex = (/** @type {Uint8Array} */ bytes) => Buffer.from(bytes).toString('hex');
  const fields = [
    'pushpull-join', hex(challenge), hex(registrationId), role, requestedRank ?? '', address ?? '',
  ];
  return createHmac('sha256', secret).update(fields.join('|')).digest();
}
