/**
 * A pushpull client: joins a cluster as a worker or a reader, creates tables, pushes and pulls.
 *
 *     const client = await PushpullClient.connect('127.0.0.1:7000');
 *     const table = await client.createTable({
 *       name: 'w', elementCount: 10, optimizer: { kind: 'SGD', hyperparameters: { lr: 0.1 } },
 *     });
 *     await client.push(table, gradient);       // one step: blocks and seals, to their outcomes
 *     const values = await client.pull(table);  // with that step in it
 *     await client.leave();
 */

import { LONGEST_WAIT_MS, expireAfter, pause } from './calls.js';
import { decodeInto, encode, nativeCodec, valuesFor } from './codecs.js';
import { PushpullError, errorFromCall, errorFromMessage } from './errors.js';
import { TableLayout, packPresence } from './layout.js';
import { PushWindow, Step } from './push_window.js';
import { SchedulerLink } from './scheduler_link.js';
import { ServerLink } from './server_link.js';
import { tableSpec } from './table_spec.js';

/** @typedef {import('./codecs.js').Values} Values */
/** @typedef {{clock: number, applied: boolean, staleness: number}} StepOutcome */

const CONNECT_MS = 60000;
const STEP_MS = 60000;
const PULL_MS = 30000;
const RETRY_MS = 100;

/** A table that this client uses. */
export class Table extends TableLayout {
  /**
   * @param {any} table a pushpull.v1.Table
   * @param {number} rangeCount
   */
  constructor(table, rangeCount) {
    super(table, rangeCount);
    this.codec = nativeCodec(this.spec.dtype);
    /** The clock of this client's newest step; where it begins, before its first. */
    this.clock = table.restoredClock ?? 0;
    /** Whether it has its values from a checkpoint. */
    this.isRestored = table.restoredClock !== undefined && table.restoredClock !== null;
    /** Whether it joins others, and has neither pulled nor stepped. */
    this.isJoining = false;
    /** The newest clock that a pull found in every range. */
    this.newestClock = this.clock;
    /** What the last pull of each block gave. @type {Map<number, number>} */
    this.peerVersions = new Map();
  }

  /** The updates beyond its clock that were formed without this worker, as far as it knows. */
  get missedCount() {
    return Math.max(this.newestClock - this.clock, 0);
  }
}

/** A session with a cluster. Made by `connect`. */
export class PushpullClient {
  #scheduler;
  #window;
  /** @type {Map<number, ServerLink>} */
  #servers = new Map();
  /** @type {Map<number, Table>} */
  #tables = new Map();
  /** @type {NodeJS.Timeout | undefined} */
  #timer;
  /** @type {PushpullError | null} */
  #failure = null;
  /** What fails then does not close the scheduler's link: it has to be told. */
  #isLeaving = false;
  /** The tables that were there before this client. @type {Set<number>} */
  #foundTables = new Set();
  #stepCount = 0;
  #pushedBytes = 0;
  #pulledBytes = 0;

  /**
   * Use `connect`.
   *
   * @param {SchedulerLink} scheduler
   * @param {{windowBytes?: number}} options
   */
  constructor(scheduler, options) {
    this.#scheduler = scheduler;
    this.#window = new PushWindow(options);
    scheduler.onLost = (error) => this.#fail(error);
    scheduler.onView = (view) => {
      this.#window.observe(view);
      this.#closeLinks();
      this.#pump();
    };
    scheduler.progress = () => this.#progress();
  }

  /**
   * Joins a cluster.
   *
   * @param {string} [addresses] the scheduler's "host:port", or several with commas; by default
   *   PUSHPULL_SCHEDULER
   * @param {object} [options]
   * @param {'worker' | 'reader'} [options.role]
   * @param {number} [options.rank] the rank to ask for; by default the lowest free one
   * @param {number} [options.connectDeadlineMs] how long to wait for the scheduler
   * @param {number} [options.windowBytes] payload bytes in flight
   * @returns {Promise<PushpullClient>} rejects with a PushpullError
   */
  static async connect(addresses = process.env.PUSHPULL_SCHEDULER ?? '', options = {}) {
    const { role = 'worker', rank, windowBytes } = options;
    const { connectDeadlineMs: deadlineMs = CONNECT_MS } = options;
    const scheduler = new SchedulerLink(addresses);
    const client = new PushpullClient(scheduler, { windowBytes });
    try {
      await scheduler.register({ role: `NODE_ROLE_${role.toUpperCase()}`, rank, deadlineMs });
      for (const { tableId } of scheduler.view.tables) client.#foundTables.add(tableId);
    } catch (failure) {
      await client.#abandon(/** @type {PushpullError} */ (failure));
      throw failure;
    }
    return client;
  }

  /** This worker's rank, from 0; 0 for a reader. */
  get rank() {
    return this.#scheduler.session.rank;
  }

  /** The number of workers of the cluster. */
  get workerCount() {
    return this.#scheduler.workerCount;
  }

  /** The newest view of the cluster, a pushpull.v1.ClusterView. */
  get view() {
    return this.#scheduler.view;
  }

  /**
   * Creates a table, or opens the identical one.
   *
   * @param {import('./table_spec.js').TableOptions} options
   * @param {{deadlineMs?: number}} [limits]
   * @returns {Promise<Table>}
   */
  async createTable(options, { deadlineMs = CONNECT_MS } = {}) {
    this.#check();
    const table = await this.#scheduler.createTable(tableSpec(options), deadlineMs);
    return this.#open(table, deadlineMs);
  }

  /**
   * Opens a table that somebody else creates; waits for it.
   *
   * @param {string} name
   * @param {{deadlineMs?: number}} [limits]
   * @returns {Promise<Table>}
   */
  async table(name, { deadlineMs = CONNECT_MS } = {}) {
    this.#check();
    const named = (/** @type {any} */ table) => table.spec.name === name;
    const view = await this.#scheduler.viewWhere(
      ({ tables }) => tables.some(named), deadlineMs, `table '${name}'`);
    return this.#open(view.tables.find(named), deadlineMs);
  }

  /**
   * The table, known to the servers of its ranges: they learn of views at their own pace.
   *
   * @param {any} table a pushpull.v1.Table
   * @param {number} deadlineMs
   */
  async #open(table, deadlineMs) {
    const known = this.#tables.get(table.tableId);
    if (known) return known;
    const opened = new Table(table, this.view.ranges.length);
    await this.#join(opened, deadlineMs);
    const held = new Set(opened.ranges);
    const servers = new Set(this.view.ranges
      .filter((/** @type {any} */ range) => held.has(range.rangeId))
      .map((/** @type {any} */ range) => range.primaryNodeId));
    const { viewNumber } = this.view;
    await Promise.all([...servers].map((nodeId) =>
      this.#server(nodeId)?.openSession(viewNumber, deadlineMs)));
    this.#check();
    // Another call may have opened it meanwhile; its clock is the one that counts.
    const first = this.#tables.get(table.tableId) ?? opened;
    this.#tables.set(table.tableId, first);
    return first;
  }

  /**
   * Waits until this worker has joined the table, if others train it already.
   *
   * @param {Table} table
   * @param {number} deadlineMs
   */
  async #join(table, deadlineMs) {
    if (!this.#isLateJoiner || !this.#foundTables.has(table.tableId)) return;
    const { incarnation, rank } = this.#scheduler.session;
    const joinIn = (/** @type {any} */ view) => view.tables
      .find((/** @type {any} */ each) => each.tableId === table.tableId)
      ?.joins.find((/** @type {any} */ join) => join.incarnation === incarnation);
    const view = await this.#scheduler.viewWhere(
      (each) => joinIn(each) !== undefined, deadlineMs,
      `join of worker ${rank} to table '${table.name}'`);
    table.clock = joinIn(view).afterClock;
    table.isJoining = true;
  }

  /** Whether others train already: it has a rank that another had, or one from workerCount on. */
  get #isLateJoiner() {
    const { role, rank, incarnation } = this.#scheduler.session;
    if (role !== 'NODE_ROLE_WORKER') return false;
    return rank >= this.view.workerCount || this.view.nodes.some((/** @type {any} */ node) =>
      node.role === role && node.rank === rank && node.incarnation < incarnation);
  }

  /**
   * Takes one step: pushes `values` and seals.
   *
   * @param {Table} table
   * @param {ArrayLike<number>} values one for each element of the table
   * @param {object} [options]
   * @param {Record<string, number>} [options.hyperparameters] for this step; others are the table's
   * @param {number} [options.contributionScale] these values are multiplied by it
   * @param {string[]} [options.absent] tensors without a gradient: skipped
   * @param {number} [options.deadlineMs]
   * @returns {Promise<StepOutcome>} when every entry has its outcome; rejects with a PushpullError
   */
  async push(table, values, { hyperparameters, contributionScale, absent = [], deadlineMs } = {}) {
    const terms = sealTerms({ hyperparameters, contributionScale });
    const parts = this.#cut(table, values, new Set(absent));
    const what = { clock: table.clock + 1, kind: 'GRADIENT', terms };
    return this.#take(table, parts, what, deadlineMs);
  }

  /**
   * Takes one step without values: this worker has no part in the update.
   *
   * @param {Table} table
   * @param {{deadlineMs?: number}} [options]
   * @returns {Promise<StepOutcome>}
   */
  async skip(table, { deadlineMs } = {}) {
    const terms = sealTerms({ skip: true });
    return this.#take(table, [], { clock: table.clock + 1, kind: 'GRADIENT', terms }, deadlineMs);
  }

  /**
   * Rank 0 gives a table that starts from rank 0 its initial values.
   *
   * @param {Table} table
   * @param {ArrayLike<number>} values
   * @param {{deadlineMs?: number}} [options]
   * @returns {Promise<StepOutcome>} rejects with a PushpullError, also where the table has values
   */
  async assign(table, values, { deadlineMs } = {}) {
    this.#check();
    checkIsNew(table);
    const parts = this.#cut(table, values, new Set());
    return this.#take(table, parts, { clock: 0, kind: 'ASSIGN', terms: sealTerms({}) }, deadlineMs);
  }

  /**
   * @param {Table} table
   * @param {ArrayLike<number>} values
   * @param {Set<string>} absent
   */
  #cut(table, values, absent) {
    checkIsDense(table);
    if (values.length !== table.elementCount) {
      throw new PushpullError(
        'INVALID_TENSOR',
        `got ${values.length} values; table '${table.name}' has ${table.elementCount}`,
      );
    }
    const parts = [];
    const slice = Array.prototype.slice;
    for (let block = 0; block < table.blockCount; block += 1) {
      const present = table.segments(block).map(({ name }) => !absent.has(name));
      if (!present.some(Boolean)) continue;
      const { begin, end } = table.bounds(block);
      const elements = ArrayBuffer.isView(values)
        ? /** @type {Values} */ (values).subarray(begin, end)
        : slice.call(values, begin, end);
      const payload = encode(elements, table.codec);
      const pulledPeerVersion = table.peerVersions.get(block);
      parts.push({ block, payload, presence: packPresence(present), pulledPeerVersion });
    }
    return parts;
  }

  /**
   * @param {Table} table
   * @param {import('./push_window.js').BlockPart[]} parts
   * @param {{clock: number, kind: string, terms: import('./push_window.js').SealTerms}} what
   * @param {number} [deadlineMs]
   */
  async #take(table, parts, { clock, kind, terms }, deadlineMs = STEP_MS) {
    this.#check();
    const step = new Step(table, { clock, codec: table.codec, kind: `PUSH_KIND_${kind}`, terms });
    if (clock) {
      table.clock = clock;
      table.isJoining = false;
    }
    for (const part of parts) this.#pushedBytes += part.payload.length;
    this.#window.submit(step, parts);
    this.#pump();
    const outcome = await withDeadline(step.done, deadlineMs, () => [
      `step ${clock} of table '${table.name}': ${step.describeOpen()}`, ...this.#troubles(),
    ].join('; '));
    this.#stepCount += 1;
    return outcome;
  }

  /** The servers that cannot be reached, in words. */
  #troubles() {
    return [...this.#servers.values()].map(({ trouble }) => trouble).filter(Boolean);
  }

  /** Sends what may be sent. */
  #pump() {
    if (this.#failure || !this.view) return;
    for (const server of this.#window.wantedServers) {
      void this.#server(server)?.openPushStream(this.view.viewNumber);
    }
    const nowMs = Date.now();
    for (const { server, request } of this.#window.take(nowMs)) {
      this.#servers.get(server)?.push(request);
    }
    clearTimeout(this.#timer);
    const nextMs = this.#window.nextTakeMs(nowMs);
    if (nextMs !== null) this.#timer = setTimeout(() => this.#pump(), nextMs - nowMs);
  }

  /**
   * @param {number} nodeId
   * @returns {ServerLink | undefined} undefined if the view does not know it
   */
  #server(nodeId) {
    this.#check();
    let link = this.#servers.get(nodeId);
    if (link) return link;
    const node = this.view.nodes.find((/** @type {any} */ each) => each.nodeId === nodeId);
    if (!node?.address) return undefined;
    link = new ServerLink(node, this.#scheduler.session);
    link.onLost = (error) => this.#fail(error);
    link.onOpen = () => {
      this.#window.streamOpened(nodeId);
      this.#pump();
    };
    link.onBroken = () => {
      this.#window.streamBroke(nodeId);
      this.#pump();
    };
    link.onReplies = (replies) => this.#answered(nodeId, replies);
    this.#servers.set(nodeId, link);
    return link;
  }

  /** Closes the links of servers that have left, or serve no range any more. */
  #closeLinks() {
    const serving = new Set(this.view.ranges.map((/** @type {any} */ each) => each.primaryNodeId));
    for (const [nodeId, link] of this.#servers) {
      const node = this.view.nodes.find((/** @type {any} */ each) => each.nodeId === nodeId);
      if (serving.has(nodeId) && link.isOf(node)) continue;
      this.#servers.delete(nodeId);
      link.close();
      this.#window.streamBroke(nodeId);
    }
  }

  /**
   * @param {number} server
   * @param {any[]} replies
   */
  #answered(server, replies) {
    try {
      const nowMs = Date.now();
      for (const reply of replies) this.#window.reply(server, reply, nowMs);
      this.#pump();
    } catch (failure) {
      this.#fail(/** @type {PushpullError} */ (failure));
    }
  }

  /**
   * Pulls a table.
   *
   * @param {Table} table
   * @param {object} [options]
   * @param {number} [options.clock] the state to wait for; by default with all own steps
   * @param {boolean} [options.consistent] exactly the state after update `clock`, everywhere (BSP)
   * @param {Values} [options.out] where to put the values; by default a new array
   * @param {number} [options.deadlineMs]
   * @returns {Promise<Values>} rejects with a PushpullError
   */
  async pull(table, { clock = table.clock, consistent = false, out, deadlineMs = PULL_MS } = {}) {
    this.#check();
    checkIsDense(table);
    const values = outFor(table, out);
    const endMs = Date.now() + deadlineMs;
    let leastClock = Infinity;
    const take = (/** @type {any} */ value) => {
      this.#store(table, values, value);
      leastClock = Math.min(leastClock, value.clock);
    };
    let missing = new Set(table.ranges);
    for (;;) {
      const asked = { tableId: table.tableId, clock, consistent };
      const { missing: left, problem } = await this.#pullOnce(asked, missing, { endMs, take });
      missing = left;
      if (!missing.size) {
        this.#reached(table, leastClock);
        return values;
      }
      const hasTime = Date.now() < endMs;
      const goesOn = problem?.code === 'WAIT_EXPIRED' && hasTime;
      if (problem && !problem.isRetryable && !goesOn) throw problem;
      if (!hasTime) {
        const why = problem?.message ?? 'no server serves its ranges';
        const what = `the pull of table '${table.name}'`;
        throw new PushpullError('WAIT_EXPIRED', `${what} expired: ${why}`);
      }
      await pause(problem?.retryAfterMs || RETRY_MS, this.#scheduler.signal);
    }
  }

  /**
   * A pull found all of the table at `clock` or beyond.
   *
   * @param {Table} table
   * @param {number} clock
   */
  #reached(table, clock) {
    table.newestClock = Math.max(table.newestClock, clock);
    const isWorker = this.#scheduler.session.role === 'NODE_ROLE_WORKER';
    if (isWorker && (table.isJoining || this.#tables.size === 1)) this.catchUp(table);
    table.isJoining = false;
  }

  /**
   * Leaves out clocks whose updates were formed without this worker, under backup workers: as many
   * on each of these tables as were on all of them, as far as their newest pulls show. A client of
   * one table does so by itself. Another calls this between two steps, with all tables that it steps
   * together; else each of its steps that is behind is discarded.
   *
   * @param {...Table} tables
   * @returns {number} how many on each
   */
  catchUp(...tables) {
    this.#check();
    const count = tables.length ? Math.min(...tables.map((table) => table.missedCount)) : 0;
    for (const table of tables) table.clock += count;
    return count;
  }

  /**
   * Asks each server once for the ranges that are missing.
   *
   * @param {object} asked
   * @param {Set<number>} ranges
   * @param {{endMs: number, take: (value: any) => void}} options
   */
  async #pullOnce(asked, ranges, { endMs, take }) {
    const missing = new Set(ranges);
    /** @type {PushpullError | null} */
    let problem = null;
    const noteProblem = (/** @type {PushpullError} */ error) => {
      if (!problem || problem.isRetryable) problem = error;
    };
    /** @type {Map<number, {rangeId: number, assignmentEpoch: number}[]>} */
    const byServer = new Map();
    for (const { rangeId, assignmentEpoch, primaryNodeId } of this.view.ranges) {
      if (!missing.has(rangeId) || !primaryNodeId) continue;
      byServer.set(primaryNodeId, [...(byServer.get(primaryNodeId) ?? []),
        { rangeId, assignmentEpoch }]);
    }
    await Promise.all([...byServer].map(async ([nodeId, parts]) => {
      const failed = new Set();
      const onPart = (/** @type {any} */ { block, error }) => {
        if (block) take(block);
        if (!error) return;
        failed.add(error.rangeId);
        noteProblem(errorFromMessage(error.error));
      };
      try {
        const link = this.#server(nodeId);
        if (!link) return;
        const leftMs = Math.min(Math.max(endMs - Date.now(), 1), LONGEST_WAIT_MS);
        await link.openSession(this.view.viewNumber, leftMs);
        await link.pull({ ...asked, ranges: parts }, leftMs, onPart);
        for (const { rangeId } of parts) if (!failed.has(rangeId)) missing.delete(rangeId);
      } catch (failure) {
        noteProblem(errorFromCall(failure));
      }
    }));
    return { missing, problem: /** @type {PushpullError | null} */ (problem) };
  }

  /**
   * @param {Table} table
   * @param {Values} values
   * @param {any} value a pushpull.v1.BlockValue
   */
  #store(table, values, value) {
    const { begin, end } = table.bounds(value.block);
    decodeInto(value.payload, value.codec, values.subarray(begin, end));
    table.peerVersions.set(value.block, value.peerVersion);
    this.#pulledBytes += value.payload.length;
  }

  #progress() {
    return {
      tables: [...this.#tables.values()].map(({ tableId, clock }) => ({ tableId, clock })),
      stepCount: this.#stepCount,
      pushedBytes: this.#pushedBytes,
      pulledBytes: this.#pulledBytes,
    };
  }

  /**
   * Leaves: nobody waits for this worker any more. Closes the client, whatever happens.
   *
   * The scheduler is told also where a last step fails, whose error comes then.
   *
   * @param {{deadlineMs?: number, reason?: string}} [options] how long to wait for last outcomes
   */
  async leave({ deadlineMs = PULL_MS, reason = 'finished' } = {}) {
    this.#check();
    this.#isLeaving = true;
    const isWorker = this.#scheduler.session.role === 'NODE_ROLE_WORKER';
    const tables = isWorker ? this.view.tables : [];
    try {
      const seals = await Promise.allSettled(tables.map((/** @type {any} */ table) =>
        this.#sealLast(table, deadlineMs)));
      await this.#scheduler.deregister(reason);
      const failed = seals.find((seal) => seal.status === 'rejected');
      if (failed) throw /** @type {PromiseRejectedResult} */ (failed).reason;
    } finally {
      this.close();
    }
  }

  /**
   * @param {any} message a pushpull.v1.Table
   * @param {number} deadlineMs
   */
  async #sealLast(message, deadlineMs) {
    const table = await this.#open(message, deadlineMs);
    const terms = sealTerms({ skip: true, last: true });
    const what = { clock: table.clock + 1, kind: 'GRADIENT', terms };
    await this.#take(table, [], what, deadlineMs);
  }

  /** Ends at once, without leaving: the cluster goes on waiting for this worker. */
  close() {
    this.#scheduler.close(this.#end());
  }

  /**
   * Ends in the middle of the work, and tells the scheduler.
   *
   * @param {PushpullError} error
   */
  async #abandon(error) {
    this.#failure ??= error;
    await this.#scheduler.abandon(this.#end());
  }

  /** Ends all but the scheduler's link; returns what calls under way reject with. */
  #end() {
    clearTimeout(this.#timer);
    this.#failure ??= new PushpullError('NOT_PERMITTED', 'the client is closed');
    this.#window.abandon(this.#failure);
    for (const link of this.#servers.values()) link.close();
    return this.#failure;
  }

  /** @param {PushpullError} error */
  #fail(error) {
    if (this.#failure) return;
    this.#failure = error;
    if (this.#isLeaving) {
      this.#window.abandon(error);
      this.#scheduler.endWaits(error);
    } else void this.#abandon(error);
  }

  #check() {
    if (this.#failure) throw this.#failure;
  }
}

/**
 * Refuses initial values for a table that has values.
 *
 * @param {Table} table
 */
function checkIsNew(table) {
  const { name, clock, isRestored } = table;
  if (!isRestored && !clock) return;
  const origin = isRestored ? 'comes from a checkpoint' : `is at clock ${clock}`;
  throw new PushpullError(
    'INVALID_CONFIG',
    `table '${name}' ${origin}, so it has its values: pull them instead of assigning others`,
  );
}

/**
 * Refuses values of a table of rows.
 *
 * @param {Table} table
 */
function checkIsDense({ name, isOfRows }) {
  if (!isOfRows) return;
  throw new PushpullError(
    'INVALID_CONFIG',
    `table '${name}' is of rows, which this client neither pushes nor pulls: take its steps with skip`,
  );
}

/**
 * Where the values of a pull go.
 *
 * @param {Table} table
 * @param {Values | null | undefined} out
 * @returns {Values}
 */
function outFor(table, out) {
  if (!out) return valuesFor(table.spec.dtype, table.elementCount);
  const isTyped = out instanceof Float32Array || out instanceof Float64Array;
  if (isTyped && out.length >= table.elementCount) return out;
  const kind = isTyped ? `a ${out.constructor.name} of ${out.length} elements` : `a ${typeof out}`;
  throw new PushpullError(
    'INVALID_TENSOR',
    `out is ${kind}; table '${table.name}' needs a Float32Array or Float64Array of at least `
      + `${table.elementCount}`,
  );
}

/**
 * @param {object} options
 * @param {Record<string, number>} [options.hyperparameters]
 * @param {number} [options.contributionScale]
 * @param {boolean} [options.skip]
 * @param {boolean} [options.last]
 * @returns {import('./push_window.js').SealTerms}
 */
function sealTerms({ hyperparameters = {}, contributionScale, skip = false, last = false }) {
  return {
    hyperparameters: Object.entries(hyperparameters).map(([name, value]) => ({ name, value })),
    ...(contributionScale === undefined ? {} : { contributionScale }),
    skip,
    last,
  };
}

/**
 * @template T
 * @param {Promise<T>} promise
 * @param {number} deadlineMs
 * @param {() => string} describe what is missing, for the error
 * @returns {Promise<T>}
 */
async function withDeadline(promise, deadlineMs, describe) {
  /** @type {NodeJS.Timeout | undefined} */
  let timer;
  const expired = new Promise((_, reject) => {
    timer = expireAfter(
      () => reject(new PushpullError('WAIT_EXPIRED', `after ${deadlineMs} ms: ${describe()}`)),
      deadlineMs,
    );
  });
  try {
    return await Promise.race([promise, /** @type {Promise<never>} */ (expired)]);
  } finally {
    clearTimeout(timer);
  }
}
