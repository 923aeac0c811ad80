/** A client's rules, against a scheduler and servers that answer what a test says. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { PushpullClient } from '../src/index.js';
import { StubCluster, stubTable } from './stub_cluster.js';

const ONES = new Float32Array(256).fill(1);

async function connect(t, cluster) {
  const client = await PushpullClient.connect(cluster.address);
  t.after(() => client.close());
  return client;
}

const invalid = (code) => ({
  outcome: 'OUTCOME_INVALID', error: { code: `ERROR_CODE_${code}`, message: code },
});

test('a table from a checkpoint goes on from its clock, also if it is never used', async (t) => {
  const cluster = await StubCluster.start(t, { table: stubTable({ restoredClock: 100 }) });
  const [server] = cluster.servers;
  const stepper = await connect(t, cluster);
  assert.equal((await stepper.push(await stepper.table('t'), ONES)).clock, 101);
  server.requests = [];
  await (await connect(t, cluster)).leave();
  assert.deepEqual(server.seals.map(({ clock, last, skip }) => [clock, last, skip]),
    [[101, true, true]]);
});

test('a step on a table of rows seals every range that has a partition', async (t) => {
  const spec = { ...stubTable().spec, elementCount: 4, blockElements: 262144, tensors: [] };
  const rows = { ...spec, name: 'rows', rows: { partitionCount: 4 } };
  const cluster = await StubCluster.start(t, { table: stubTable({ spec: rows }) });
  const client = await connect(t, cluster);
  const table = await client.table('rows');
  const refused = { code: 'INVALID_CONFIG', message: /table 'rows' is of rows/ };
  await assert.rejects(client.assign(table, new Float32Array(4)), refused);
  await client.skip(table);
  await assert.rejects(client.push(table, new Float32Array(4)), refused);
  await assert.rejects(client.pull(table), refused);
  await client.leave();
  const { seals } = cluster.servers[0];
  assert.deepEqual(seals.map(({ clock, last }) => [clock, last]), [[1, false], [2, true]]);
  for (const { ranges } of seals) assert.deepEqual(ranges.map(({ rangeId }) => rangeId), [0, 2, 3]);
});

test('a worker that joins others begins at the least clock of its first pull', async (t) => {
  const before = { nodeId: 99, incarnation: 99, role: 'NODE_ROLE_WORKER', rank: 0 };
  const nodes = [{ ...before, state: 'NODE_STATE_GONE' }];
  const cluster = await StubCluster.start(t, { nodes });
  const client = await connect(t, cluster);
  const opened = client.table('t');
  const joins = [[99, 3], [100, 7]].map(([incarnation, afterClock]) =>
    ({ rank: 0, incarnation, afterClock }));
  cluster.show({ tables: [{ ...cluster.table, joins }] });
  const table = await opened;
  assert.equal(table.clock, 7);
  cluster.servers[0].clock = 9;
  await client.pull(table);
  assert.equal((await client.push(table, ONES)).clock, 10);
});

test('a worker that updates were formed without goes on from the least clock', async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  const table = await client.table('t');
  const [server] = cluster.servers;
  const taken = server.outcomeOf;
  server.outcomeOf = () => ({ outcome: 'OUTCOME_DISCARDED' });
  assert.deepEqual(await client.push(table, ONES), { clock: 1, applied: false, staleness: 0 });
  server.outcomeOf = taken;
  server.clock = 9;
  await client.pull(table);
  assert.deepEqual(await client.push(table, ONES), { clock: 10, applied: true, staleness: 0 });
  await client.pull(table);
  assert.equal((await client.push(table, ONES)).clock, 11);
});

test('of tables that are stepped together the same number of clocks is left out', async (t) => {
  const cluster = await StubCluster.start(t);
  const other = stubTable({ tableId: 2, spec: { ...cluster.table.spec, name: 'u' } });
  cluster.show({ tables: [cluster.table, other] });
  const client = await connect(t, cluster);
  const tables = [await client.table('t'), await client.table('u')];
  const [server] = cluster.servers;
  const clocks = async () => (await Promise.all(tables.map((each) => client.push(each, ONES))))
    .map(({ clock }) => clock);
  server.clock = 9;
  await client.pull(tables[0]);
  assert.equal(client.catchUp(...tables), 0);
  assert.deepEqual(await clocks(), [1, 1]);
  server.clock = 4;
  await client.pull(tables[1]);
  assert.equal(client.catchUp(...tables), 3);
  assert.deepEqual(await clocks(), [5, 5]);
  assert.equal(client.catchUp(), 0);
});

test('who leaves says so to the scheduler though no last step can be taken', async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  cluster.servers[0].outcomeOf = ({ seal }) =>
    (seal ? invalid('INVALID_CONFIG') : { outcome: 'OUTCOME_APPLIED' });
  await assert.rejects(client.leave(), { code: 'INVALID_CONFIG' });
  assert.ok(cluster.hasLeft);
});

const STRANGERS = {
  'a cluster that was restored': { refusal: 'FENCED' },
  'something else': { refusal: 'UNIMPLEMENTED' },
  'a server that stops': { refusal: 'CANCELLED' },
  'another server': { identity: { nodeId: 99 } },
  'a later life of the server': { identity: { incarnation: 99 } },
  'a server of another cluster': { identity: { clusterId: 'another' } },
};

for (const [who, stranger] of Object.entries(STRANGERS)) {
  test(`${who} at a server's address is nobody: requests follow the range`, async (t) => {
    const cluster = await StubCluster.start(t, { serverCount: 2 });
    const client = await connect(t, cluster);
    const table = await client.table('t');
    const [before, after] = cluster.servers;
    after.value = 5;
    Object.assign(before, stranger, {
      onOpenSession: () => {
        before.onOpenSession = () => {};
        cluster.show({ primary: 12 });
      },
    });
    cluster.show();
    await client.createTable({ name: 't', elementCount: 256, optimizer: { kind: 'SGD' } });
    const [step, values] = await Promise.all([client.push(table, ONES), client.pull(table)]);
    assert.deepEqual([step.applied, values[0]], [true, 5]);
    assert.deepEqual(before.requests, []);
    assert.equal(after.requests.find(({ header }) => header).header.receiverNodeId, 12);
  });
}

test('initial values with an invalid block reject with its error', async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  const table = await client.table('t');
  const [server] = cluster.servers;
  const taken = server.outcomeOf;
  server.outcomeOf = ({ seal }) => invalid(seal ? 'INVALID_CONFIG' : 'INVALID_TENSOR');
  await assert.rejects(client.assign(table, ONES), { code: 'INVALID_TENSOR' });
  server.outcomeOf = taken;
  assert.deepEqual(await client.assign(table, ONES), { clock: 0, applied: true, staleness: 0 });
});

test('deadlines that are longer than a timer can be do not expire', async (t) => {
  /** As long as the timer of such a delay would take, and longer. */
  const TIMER_MS = 10;
  const cluster = await StubCluster.start(t);
  cluster.show({ tables: [] });
  const client = await connect(t, cluster);
  const [server] = cluster.servers;
  server.outcomeOf = async () => {
    await sleep(TIMER_MS);
    return { outcome: 'OUTCOME_APPLIED' };
  };
  const opened = client.table('t', { deadlineMs: 2 ** 31 });
  await sleep(TIMER_MS);
  cluster.show();
  const table = await opened;
  assert.ok((await client.push(table, ONES, { deadlineMs: Infinity })).applied);
  await client.pull(table, { deadlineMs: Infinity });
  const [{ pull }] = server.requests.filter((each) => each.pull);
  assert.equal(pull.deadlineMs, 3600000);
});

test('a pull into what cannot take the table rejects, and asks nobody', async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  const table = await client.table('t');
  for (const out of [new Float32Array(1), new Array(256).fill(0), new Int32Array(256)]) {
    await assert.rejects(client.pull(table, { out }), { code: 'INVALID_TENSOR' });
  }
  assert.deepEqual(cluster.servers[0].requests, []);
  const out = new Float32Array(256).fill(1);
  assert.equal(await client.pull(table, { out }), out);
  assert.equal(out[255], 0);
});

test('a pull of values that do not fit their block rejects, and the client lives', async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  const table = await client.table('t');
  cluster.servers[0].blockValue = { payload: Buffer.alloc(4) };
  await assert.rejects(client.pull(table), { code: 'INVALID_TENSOR' });
  cluster.servers[0].blockValue = {};
  await client.pull(table);
});

test('values that are not of the table reject', async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  const table = await client.table('t');
  await assert.rejects(client.push(table, [1]), { code: 'INVALID_TENSOR' });
  await assert.rejects(client.assign(table, [1]), { code: 'INVALID_TENSOR' });
  assert.equal((await client.push(table, ONES)).clock, 1);
});

test('a table that has its values takes no initial ones, and goes on from its clock', async (t) => {
  const cluster = await StubCluster.start(t, { table: stubTable({ restoredClock: 100 }) });
  const restored = await connect(t, cluster);
  const table = await restored.table('t');
  await assert.rejects(restored.assign(table, ONES), {
    code: 'INVALID_CONFIG', message: /comes from a checkpoint.*pull them/,
  });
  assert.equal((await restored.push(table, ONES)).clock, 101);
});

test('initial values that a server refuses change no clock', async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  const table = await client.table('t');
  await client.push(table, ONES);
  await assert.rejects(client.assign(table, ONES), { code: 'INVALID_CONFIG', message: /clock 1/ });
  const steps = await Promise.all([client.push(table, ONES), client.skip(table)]);
  assert.deepEqual(steps.map(({ clock }) => clock), [2, 3]);
  const clocks = cluster.servers[0].seals.map(({ clock }) => clock);
  assert.deepEqual(clocks.sort(), [1, 2, 3]);
});

test('what is under way when the client ends rejects with its error', async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  const table = await client.table('t');
  const [server] = cluster.servers;
  server.pullError = 'RECOVERING';
  cluster.createsTables = false;
  const pulled = new Promise((resolve) => { server.onPull = resolve; });
  const created = new Promise((resolve) => { cluster.onCreateTable = resolve; });
  const spec = { name: 'new', elementCount: 256, optimizer: { kind: 'SGD' } };
  const calls = [
    client.pull(table, { deadlineMs: Infinity }),
    client.createTable(spec, { deadlineMs: 3000 }),
    client.table('another', { deadlineMs: 3000 }),
  ].map((call) => assert.rejects(call, { name: 'PushpullError', code: 'NOT_PERMITTED' }));
  await Promise.all([pulled, created]);
  client.close();
  await Promise.all(calls);
});

test('who leaves waits for no view once a step has failed', { timeout: 10000 }, async (t) => {
  const before = { nodeId: 99, incarnation: 99, role: 'NODE_ROLE_WORKER', rank: 0 };
  const nodes = [{ ...before, state: 'NODE_STATE_GONE' }];
  const table = stubTable({ joins: [{ rank: 0, incarnation: 100, afterClock: 7 }] });
  const cluster = await StubCluster.start(t, { nodes, table });
  cluster.show({ tables: [table, { ...stubTable(), tableId: 2 }] });
  const client = await connect(t, cluster);
  cluster.servers[0].outcomeOf = () => invalid('INVALID_CONFIG');
  await assert.rejects(client.leave({ deadlineMs: Infinity }), { code: 'INVALID_CONFIG' });
  assert.ok(cluster.hasLeft);
});

test('a connect that sees no view gives its rank back', async (t) => {
  const cluster = await StubCluster.start(t);
  cluster.isSilent = true;
  const connecting = PushpullClient.connect(cluster.address, { connectDeadlineMs: 300 });
  await assert.rejects(connecting, { code: 'WAIT_EXPIRED' });
  assert.deepEqual(cluster.farewells.map(({ unfinished }) => unfinished), [true]);
});

test('a client that fails gives its rank back', { timeout: 10000 }, async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  const table = await client.table('t');
  cluster.servers[0].outcomeOf = () => invalid('INVALID_CONFIG');
  const heard = new Promise((resolve) => { cluster.onFarewell = resolve; });
  await assert.rejects(client.push(table, ONES), { code: 'INVALID_CONFIG' });
  assert.ok((await heard).unfinished);
  await assert.rejects(client.leave(), { code: 'INVALID_CONFIG' });
});

test('what a stranger at the address has refused does not count', async (t) => {
  const cluster = await StubCluster.start(t);
  const client = await connect(t, cluster);
  const table = await client.table('t');
  const [server] = cluster.servers;
  server.pushRefusals = ['FENCED'];
  server.refusal = 'UNIMPLEMENTED';
  server.onOpenSession = () => { server.refusal = null; };
  assert.ok((await client.push(table, ONES)).applied);
});
