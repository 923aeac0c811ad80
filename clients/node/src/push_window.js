/**
 * The push window: what to send, send again and hold back (docs/reference/PROTOCOL.md, "Pushing").
 *
 * A pure machine: it knows no gRPC and no clock. Steps, views, connections and replies come in;
 * what may be sent now comes out of `take`. An entry moves like this:
 *
 *     queued --take--> sent --RECEIVED--> received --COMMITTED--> ended
 *        ^              |                    |
 *        +-- REFUSED ---+---- GIVEN_BACK ----+     (and: the stream broke, or a retryable ERROR)
 *
 * Rules:
 *   - Payload bytes sent and not yet answered stay within `windowBytes`; one block may always go.
 *   - The seals of a step leave when each of its blocks is received or ended; all of them with skip
 *     if a block was INVALID.
 *   - A seal that is INVALID is followed by one with skip, so that nobody waits for the step. None
 *     follows where the clock is over all the same, or the table is.
 *   - Initial values (clock 0) cannot be skipped: where one is INVALID, so is every seal, and
 *     the step ends. The blocks of the next attempt replace those of this one.
 */

import { PushpullError, errorFromMessage } from './errors.js';

/**
 * @typedef {object} BlockPart
 * @property {number} block
 * @property {Buffer} payload
 * @property {Buffer} presence
 * @property {number} [pulledPeerVersion]
 */
/**
 * @typedef {object} SealTerms
 * @property {{name: string, value: number}[]} hyperparameters
 * @property {number} [contributionScale]
 * @property {boolean} skip
 * @property {boolean} last
 */
/**
 * @typedef {object} Entry
 * @property {Step} step
 * @property {number} rangeId
 * @property {number} sequence
 * @property {BlockPart | null} part null for a seal
 * @property {'queued' | 'sent' | 'received' | 'ended'} state
 * @property {number} server where it was sent; 0 if nowhere
 * @property {number} retryMs not before this time
 * @property {boolean} skip seals: send it with skip
 * @property {number} replaces the sequence of the same block in a failed attempt; 0 if none
 */

/** @typedef {{server: number, epoch: number}} Owner */

const FALLBACK_RETRY_MS = 500;
/** A server that gives a range up and comes back to it passes so many epochs, or more. */
const EPOCHS_TO_RETURN = 3;
/** With these the clock is over all the same, or the table is: no other seal changes that. */
const OVER = new Set(['EDIT_REFUSED', 'UPDATE_FAILED']);

/** One step of one table on its way; `done` settles when every entry has its outcome. */
export class Step {
  /**
   * @param {import('./layout.js').TableLayout} layout
   * @param {{clock: number, codec: string, kind: string, terms: SealTerms}} options
   */
  constructor(layout, { clock, codec, kind, terms }) {
    this.layout = layout;
    this.clock = clock;
    this.codec = codec;
    this.kind = kind;
    this.terms = terms;
    /** @type {Entry[]} */
    this.entries = [];
    this.openCount = 0;
    this.sealsReleased = false;
    this.isOver = false;
    this.isApplied = !terms.skip;
    /** @type {PushpullError | null} */
    this.problem = null;
    this.staleness = 0;
    /** @type {(outcome: {clock: number, applied: boolean, staleness: number}) => void} */
    this.resolve = () => {};
    /** @type {(error: PushpullError) => void} */
    this.reject = () => {};
    this.done = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    // Whoever awaits `done` sees the error; nobody has to.
    this.done.catch(() => {});
  }

  /** Whether seals that are sent now skip: an entry was wrong, and not the edit of a clock. */
  get isSpoilt() {
    return this.problem !== null && this.problem.code !== 'EDIT_REFUSED';
  }

  /** What has no outcome yet, for error messages. */
  describeOpen() {
    const open = this.entries.filter((entry) => entry.state !== 'ended');
    const named = open.slice(0, 4).map(({ part, rangeId, state }) =>
      `${part ? `block ${part.block}` : 'seal'} (range ${rangeId}, ${state})`);
    return `${open.length} of ${this.entries.length} entries have no outcome: ${named.join(', ')}`;
  }
}

/**
 * @param {Step} step
 * @param {BlockPart} part
 */
const blockKey = (step, part) => `${step.layout.tableId}/${part.block}`;

/** All pushes and seals of one worker, over all tables and servers. */
export class PushWindow {
  #windowBytes;
  #inFlightBytes = 0;
  /** Entries without an outcome, in order of submission. @type {Map<string, Entry>} */
  #open = new Map();
  /** @type {Map<string, {next: number, confirmed: number, ended: Set<number>}>} */
  #sequences = new Map();
  /** @type {Map<number, Owner>} */
  #owners = new Map();
  /** Servers with an open stream. @type {Set<number>} */
  #connected = new Set();
  /** No block of (server, table) before this time. @type {Map<string, number>} */
  #blocked = new Map();
  /** Initial values that came to nothing, by table and block. @type {Map<string, number>} */
  #failedValues = new Map();

  /** @param {{windowBytes?: number}} [options] payload bytes in flight, over all servers */
  constructor({ windowBytes = 32 * 1024 * 1024 } = {}) {
    this.#windowBytes = windowBytes;
  }

  /** Payload bytes sent and not yet answered. */
  get inFlightBytes() {
    return this.#inFlightBytes;
  }

  /** Servers to which something is to be sent. */
  get wantedServers() {
    const wanted = new Set();
    for (const entry of this.#open.values()) {
      const owner = this.#owners.get(entry.rangeId);
      if (owner?.server) wanted.add(owner.server);
    }
    return wanted;
  }

  /**
   * Queues a step: its blocks, then a seal for every range of the table.
   *
   * @param {Step} step
   * @param {BlockPart[]} parts
   */
  submit(step, parts) {
    for (const part of parts) this.#add(step, step.layout.rangeOfBlock[part.block], part);
    for (const rangeId of step.layout.ranges) this.#add(step, rangeId, null);
  }

  /**
   * @param {Step} step
   * @param {number} rangeId
   * @param {BlockPart | null} part
   */
  #add(step, rangeId, part) {
    const sequence = this.#sequence(step.layout.tableId, rangeId).next++;
    const isInitial = part !== null && step.clock === 0;
    /** @type {Entry} */
    const entry = {
      step,
      rangeId,
      sequence,
      part,
      state: 'queued',
      server: 0,
      retryMs: 0,
      skip: step.terms.skip,
      replaces: (isInitial && this.#failedValues.get(blockKey(step, part))) || 0,
    };
    this.#open.set(`${step.layout.tableId}/${rangeId}/${sequence}`, entry);
    step.entries.push(entry);
    step.openCount += 1;
    return entry;
  }

  /**
   * @param {number} tableId
   * @param {number} rangeId
   */
  #sequence(tableId, rangeId) {
    const key = `${tableId}/${rangeId}`;
    let found = this.#sequences.get(key);
    if (!found) this.#sequences.set(key, found = { next: 1, confirmed: 0, ended: new Set() });
    return found;
  }

  /**
   * Takes over who serves what. What was sent to a server that a range has left goes again; so does
   * what was sent to one that may have given the range up, in views that did not come.
   *
   * @param {any} view a pushpull.v1.ClusterView
   */
  observe(view) {
    const returned = new Set();
    for (const { rangeId, primaryNodeId: server, assignmentEpoch: epoch } of view.ranges) {
      const before = this.#owners.get(rangeId);
      if (before && epoch >= before.epoch + EPOCHS_TO_RETURN) returned.add(rangeId);
      this.#owners.set(rangeId, { server, epoch });
    }
    for (const entry of this.#open.values()) {
      const { rangeId, server } = entry;
      const hasLeft = server !== this.#owners.get(rangeId)?.server;
      if (server && (hasLeft || returned.has(rangeId))) this.#requeue(entry);
    }
  }

  /** @param {number} server */
  streamOpened(server) {
    this.#connected.add(server);
  }

  /**
   * The stream broke: what has no outcome goes again, received or not.
   *
   * @param {number} server
   */
  streamBroke(server) {
    this.#connected.delete(server);
    for (const key of this.#blocked.keys()) {
      if (key.startsWith(`${server}/`)) this.#blocked.delete(key);
    }
    for (const entry of this.#open.values()) if (entry.server === server) this.#requeue(entry);
  }

  /**
   * A server answered. Answers about entries that have ended, or are unknown, change nothing.
   *
   * @param {number} server
   * @param {any} reply a pushpull.v1.EntryReply
   * @param {number} nowMs
   */
  reply(server, reply, nowMs) {
    const place = `${server}/${reply.tableId}`;
    if (reply.kind === 'REPLY_KIND_CREDIT') {
      this.#blocked.delete(place);
      return;
    }
    const entry = this.#open.get(`${reply.tableId}/${reply.rangeId}/${reply.sequence}`);
    if (!entry) return;
    switch (reply.kind) {
      case 'REPLY_KIND_RECEIVED':
        if (entry.state === 'sent') this.#leaveFlight(entry, 'received');
        break;
      case 'REPLY_KIND_COMMITTED':
        this.#end(entry, reply);
        break;
      case 'REPLY_KIND_REFUSED':
      case 'REPLY_KIND_GIVEN_BACK':
        this.#blocked.set(place, nowMs + (reply.error?.retryAfterMs || FALLBACK_RETRY_MS));
        this.#requeue(entry);
        break;
      case 'REPLY_KIND_ERROR':
        this.#failed(entry, errorFromMessage(reply.error), nowMs);
        break;
      default:
        throw new PushpullError('INTERNAL', `reply kind ${reply.kind} is not in the contract`);
    }
  }

  /**
   * @param {Entry} entry
   * @param {PushpullError} error
   * @param {number} nowMs
   */
  #failed(entry, error, nowMs) {
    if (!error.isRetryable) throw error;
    this.#requeue(entry);
    entry.retryMs = nowMs + (error.retryAfterMs || FALLBACK_RETRY_MS);
  }

  /** @param {Entry} entry */
  #requeue(entry) {
    this.#leaveFlight(entry, 'queued');
    entry.server = 0;
  }

  /**
   * @param {Entry} entry
   * @param {Entry['state']} state
   */
  #leaveFlight(entry, state) {
    if (entry.state === 'sent' && entry.part) this.#inFlightBytes -= entry.part.payload.length;
    entry.state = state;
  }

  /**
   * @param {Entry} entry
   * @param {any} reply COMMITTED
   */
  #end(entry, reply) {
    const { step } = entry;
    const { tableId } = step.layout;
    this.#leaveFlight(entry, 'ended');
    this.#open.delete(`${tableId}/${entry.rangeId}/${entry.sequence}`);
    this.#confirm(tableId, entry);
    step.openCount -= 1;
    step.staleness = Math.max(step.staleness, reply.staleness);
    if (reply.outcome !== 'OUTCOME_APPLIED') step.isApplied = false;
    if (reply.outcome === 'OUTCOME_INVALID') this.#invalid(entry, errorFromMessage(reply.error));
    if (step.isOver) return;
    step.isOver = this.#cameToNothing(step) || !step.openCount;
    if (!step.isOver) return;
    if (step.problem) step.reject(step.problem);
    else step.resolve({ clock: step.clock, applied: step.isApplied, staleness: step.staleness });
  }

  /**
   * @param {Entry} entry
   * @param {PushpullError} error
   */
  #invalid(entry, error) {
    entry.step.problem ??= error;
    if (entry.part || OVER.has(error.code)) return;
    if (!entry.skip) this.#add(entry.step, entry.rangeId, null).skip = true;
    else if (entry.step.clock) {
      entry.step.reject(entry.step.problem);
      throw error;
    }
  }

  /**
   * Whether these initial values came to nothing: all seals have ended, and something is wrong.
   *
   * @param {Step} step
   */
  #cameToNothing(step) {
    if (step.clock || !step.problem) return false;
    if (step.entries.some(({ part, state }) => !part && state !== 'ended')) return false;
    for (const { part, sequence } of step.entries) {
      if (part) this.#failedValues.set(blockKey(step, part), sequence);
    }
    return true;
  }

  /**
   * @param {number} tableId
   * @param {Entry} entry
   */
  #confirm(tableId, entry) {
    const place = this.#sequence(tableId, entry.rangeId);
    place.ended.add(entry.sequence);
    while (place.ended.delete(place.confirmed + 1)) place.confirmed += 1;
  }

  /**
   * What to send now, to which server; every entry in it counts as sent.
   *
   * @param {number} nowMs
   * @returns {{server: number, request: object}[]}
   */
  take(nowMs) {
    const found = [];
    let isFull = false;
    /** @type {Map<string, Entry[]>} */
    const seals = new Map();
    for (const entry of this.#open.values()) {
      const owner = this.#owners.get(entry.rangeId);
      if (entry.state !== 'queued' || entry.retryMs > nowMs) continue;
      if (!owner || !this.#connected.has(owner.server)) continue;
      const { tableId } = entry.step.layout;
      if (!entry.part) {
        if (!this.#maySeal(entry.step)) continue;
        const skip = entry.skip || entry.step.isSpoilt;
        const key = `${owner.server}/${tableId}/${entry.step.clock}/${skip}`;
        entry.skip = skip;
        seals.set(key, [...(seals.get(key) ?? []), entry]);
        continue;
      }
      if (isFull || (this.#blocked.get(`${owner.server}/${tableId}`) ?? 0) > nowMs) continue;
      isFull = this.#inFlightBytes > 0
        && this.#inFlightBytes + entry.part.payload.length > this.#windowBytes;
      if (!isFull) found.push({ server: owner.server, request: this.#blockRequest(entry, owner) });
    }
    for (const entries of seals.values()) found.push(this.#sealRequest(entries));
    return found;
  }

  /** @param {Step} step */
  #maySeal(step) {
    step.sealsReleased ||= step.entries.every((entry) =>
      !entry.part || entry.state === 'received' || entry.state === 'ended');
    return step.sealsReleased;
  }

  /**
   * @param {Entry} entry
   * @param {Owner} owner
   */
  #blockRequest(entry, owner) {
    const { step, part } = entry;
    const { block, payload, presence, pulledPeerVersion } = /** @type {BlockPart} */ (part);
    entry.state = 'sent';
    entry.server = owner.server;
    this.#inFlightBytes += payload.length;
    return {
      block: {
        rangeId: entry.rangeId,
        assignmentEpoch: owner.epoch,
        tableId: step.layout.tableId,
        block,
        clock: step.clock,
        sequence: entry.sequence,
        replaces: entry.replaces,
        confirmedSequence: this.#sequence(step.layout.tableId, entry.rangeId).confirmed,
        codec: step.codec,
        kind: step.kind,
        presence,
        payload,
        ...(pulledPeerVersion === undefined ? {} : { pulledPeerVersion }),
      },
    };
  }

  /** @param {Entry[]} entries of one step, for one server */
  #sealRequest(entries) {
    const { step, skip } = entries[0];
    const { tableId } = step.layout;
    let server = 0;
    const ranges = entries.map((entry) => {
      const owner = /** @type {Owner} */ (this.#owners.get(entry.rangeId));
      entry.state = 'sent';
      entry.server = server = owner.server;
      return {
        rangeId: entry.rangeId,
        assignmentEpoch: owner.epoch,
        sequence: entry.sequence,
        confirmedSequence: this.#sequence(tableId, entry.rangeId).confirmed,
      };
    });
    // What was wrong with the terms would be wrong again; a skipped step needs none.
    const terms = skip ? { last: step.terms.last } : step.terms;
    return { server, request: { seal: { ...terms, tableId, clock: step.clock, ranges, skip } } };
  }

  /**
   * When `take` may give more without a new reply; null if never.
   *
   * @param {number} nowMs
   * @returns {number | null}
   */
  nextTakeMs(nowMs) {
    const times = [...this.#blocked.values()];
    for (const entry of this.#open.values()) times.push(entry.retryMs);
    const later = times.filter((time) => time > nowMs);
    return later.length ? Math.min(...later) : null;
  }

  /**
   * Ends every step that is still open.
   *
   * @param {PushpullError} error
   */
  abandon(error) {
    const steps = new Set([...this.#open.values()].map((entry) => entry.step));
    this.#open.clear();
    for (const step of steps) step.reject(error);
  }
}
