/**
 * A scheduler and its servers, as far as a client's own rules need them. Tests say what they
 * answer; the real ones are in tests/system.
 */

import grpc from '@grpc/grpc-js';

import { ParameterService, SchedulerService, messageType } from '../src/contract.js';

const CLUSTER_ID = 'stub';
const ELEMENT_COUNT = 256;
const BLOCK_ELEMENTS = 64;
/** Of four ranges, those that hold the four blocks; range 0 holds blocks 0 and 2. */
const BLOCKS_OF_RANGE = { 0: [0, 2], 2: [1], 3: [3] };
const CODES = {
  FENCED: grpc.status.FAILED_PRECONDITION,
  UNIMPLEMENTED: grpc.status.UNIMPLEMENTED,
  CANCELLED: grpc.status.CANCELLED,
};

/** A table of 256 elements in four blocks. */
export function stubTable(rest = {}) {
  const spec = {
    name: 't',
    dtype: 'DTYPE_FLOAT32',
    elementCount: ELEMENT_COUNT,
    blockElements: BLOCK_ELEMENTS,
    tensors: [{ name: 't', shape: [ELEMENT_COUNT], offset: 0 }],
  };
  return { tableId: 1, firstOrdinal: 0, spec, joins: [], ...rest };
}

/** The failure of a call: an error of the catalogue, or one of gRPC's own. */
export function failureOf(code) {
  const metadata = new grpc.Metadata();
  if (code === 'FENCED') {
    const error = { code: `ERROR_CODE_${code}`, message: code };
    metadata.set('pushpull-error-bin', messageType('Error').serialize(error));
  }
  return Object.assign(new Error(code), { code: CODES[code], metadata });
}

async function serve(Service, methods) {
  const server = new grpc.Server();
  server.addService(Service.service, methods);
  const port = await new Promise((resolve, reject) => {
    server.bindAsync('127.0.0.1:0', grpc.ServerCredentials.createInsecure(), (failure, found) => {
      if (failure) reject(failure);
      else resolve(found);
    });
  });
  return { server, address: `127.0.0.1:${port}` };
}

/** A server that takes every step at once, and says that every value is `value`. */
class StubServer {
  value = 0;
  clock = 0;
  /** What came, in order: the blocks, seals and pulls. */
  requests = [];
  /** How an OpenSession fails; null: it does not. */
  refusal = null;
  /** What an OpenSession answers otherwise than this server would. */
  identity = {};
  onOpenSession = () => {};
  /** How the next push streams fail. */
  pushRefusals = [];
  /** The code of the error that pulls answer; null: they answer values. */
  pullError = null;
  onPull = () => {};
  /** The outcome of an entry, as a part of its EntryReply, or a promise of it. */
  outcomeOf = () => ({ outcome: 'OUTCOME_APPLIED' });
  /** What is otherwise in a BlockValue. */
  blockValue = {};

  constructor(nodeId) {
    this.nodeId = nodeId;
    this.incarnation = nodeId;
  }

  async start() {
    const { server, address } = await serve(ParameterService, {
      OpenSession: (call, answer) => this.#openSession(call, answer),
      Push: (stream) => this.#push(stream),
      Pull: (stream) => this.#pull(stream),
    });
    Object.assign(this, { server, address });
  }

  #openSession(call, answer) {
    const { nodeId, incarnation, refusal } = this;
    this.onOpenSession();
    if (refusal) answer(failureOf(refusal));
    else answer(null, { clusterId: CLUSTER_ID, nodeId, incarnation, ...this.identity });
  }

  #push(stream) {
    const refusal = this.pushRefusals.shift();
    if (refusal) {
      stream.emit('error', failureOf(refusal));
      return;
    }
    /** Blocks whose step is not sealed yet. */
    const held = new Map();
    const reply = ({ tableId, rangeId, sequence }, rest) => {
      stream.write({ replies: [{ tableId, rangeId, sequence, ...rest }] });
    };
    const end = async (place, entry) =>
      reply(place, { kind: 'REPLY_KIND_COMMITTED', ...await this.outcomeOf(entry) });
    stream.on('data', async ({ header, block, seal }) => {
      this.requests.push({ header, block, seal });
      if (block) {
        const { outcome } = await this.outcomeOf({ block });
        if (outcome === 'OUTCOME_INVALID') await end(block, { block });
        else {
          held.set(`${block.tableId}/${block.rangeId}/${block.sequence}`, block);
          reply(block, { kind: 'REPLY_KIND_RECEIVED' });
        }
      }
      for (const { rangeId, sequence } of seal?.ranges ?? []) {
        const { tableId } = seal;
        const { outcome } = await this.outcomeOf({ seal });
        if (outcome !== 'OUTCOME_INVALID') {
          for (const [key, each] of held) {
            if (each.tableId !== tableId || each.rangeId !== rangeId) continue;
            held.delete(key);
            await end(each, { block: each });
          }
        }
        await end({ tableId, rangeId, sequence }, { seal });
      }
    });
    stream.on('end', () => stream.end());
    stream.on('error', () => {});
  }

  #pull(stream) {
    const { request } = stream;
    this.requests.push({ pull: request });
    this.onPull();
    const payload = Buffer.from(new Float32Array(BLOCK_ELEMENTS).fill(this.value).buffer);
    for (const { rangeId } of request.ranges) {
      if (this.pullError) {
        const error = { code: `ERROR_CODE_${this.pullError}`, message: this.pullError };
        stream.write({ error: { rangeId, error } });
        continue;
      }
      for (const block of BLOCKS_OF_RANGE[rangeId]) {
        const value = { block, clock: this.clock, codec: 'CODEC_FP32', payload };
        stream.write({ block: { ...value, ...this.blockValue } });
      }
    }
    stream.end();
  }

  get seals() {
    return this.requests.flatMap(({ seal }) => (seal ? [seal] : []));
  }
}

/** The cluster of one worker; `show` publishes a view. */
export class StubCluster {
  /** The requests of those who said goodbye. */
  farewells = [];
  onFarewell = () => {};
  /** Whether nobody is sent a view. */
  isSilent = false;
  createsTables = true;
  onCreateTable = () => {};
  #watches = new Set();
  #viewNumber = 0;

  /** @param t the test, with whose end this one ends */
  static async start(t, { serverCount = 1, table = stubTable(), nodes = [] } = {}) {
    const cluster = new StubCluster();
    cluster.table = table;
    cluster.servers = Array.from({ length: serverCount }, (_, index) => new StubServer(11 + index));
    await Promise.all(cluster.servers.map((server) => server.start()));
    const { server, address } = await serve(SchedulerService, cluster.#methods());
    cluster.address = address;
    cluster.nodes = nodes;
    t.after(() => {
      for (const each of [server, ...cluster.servers.map((own) => own.server)]) {
        each.forceShutdown();
      }
    });
    cluster.show({ tables: [table] });
    return cluster;
  }

  /** A view in which server `primary` has all ranges. */
  show({ primary = 11, tables = [this.table] } = {}) {
    this.#viewNumber += 1;
    const state = 'NODE_STATE_ALIVE';
    this.view = {
      viewNumber: this.#viewNumber,
      clusterId: CLUSTER_ID,
      workerCount: 1,
      serverCount: this.servers.length,
      nodes: [
        ...this.servers.map(({ nodeId, incarnation, address }) =>
          ({ nodeId, incarnation, address, role: 'NODE_ROLE_SERVER', state })),
        ...this.nodes,
      ],
      ranges: [0, 1, 2, 3].map((rangeId) =>
        ({ rangeId, primaryNodeId: primary, assignmentEpoch: this.#viewNumber })),
      tables,
    };
    for (const watch of this.#watches) watch.write({ view: this.view });
    return this.#viewNumber;
  }

  get hasLeft() {
    return this.farewells.some(({ unfinished }) => !unfinished);
  }

  #methods() {
    const session = {
      clusterId: CLUSTER_ID, nodeId: 100, incarnation: 100, role: 'NODE_ROLE_WORKER', rank: 0,
    };
    return {
      GetJoinChallenge: (call, answer) => answer(null, { challenge: Buffer.alloc(16) }),
      RegisterNode: (call, answer) =>
        answer(null, { session, workerCount: 1, heartbeatIntervalMs: 1000, leaseMs: 3000 }),
      Heartbeat: (call, answer) => answer(null, {}),
      CreateTable: (call, answer) => {
        this.onCreateTable();
        if (this.createsTables) answer(null, { table: this.table, viewNumber: this.#viewNumber });
      },
      DeregisterNode: ({ request }, answer) => {
        this.farewells.push(request);
        this.onFarewell(request);
        answer(null, {});
      },
      WatchCluster: (stream) => {
        this.#watches.add(stream);
        stream.on('cancelled', () => this.#watches.delete(stream));
        if (!this.isSilent) stream.write({ view: this.view });
      },
    };
  }
}
