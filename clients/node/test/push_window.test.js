/** The push window's rules, one by one. It is a pure machine: the tests are its network. */

import assert from 'node:assert/strict';
import { beforeEach, test } from 'node:test';

import { TableLayout } from '../src/layout.js';
import { PushWindow, Step } from '../src/push_window.js';

const RANGE_COUNT = 4;
const TERMS = { hyperparameters: [], skip: false, last: false };
/** Blocks 0 to 3 of 64 elements; first ordinal 0, so their ranges are 0, 2, 0 and 3. */
const layout = new TableLayout({
  tableId: 1,
  firstOrdinal: 0,
  spec: { name: 't', elementCount: 256, blockElements: 64, tensors: [] },
}, RANGE_COUNT);

/** Ranges 0 and 1 at server 11, 2 and 3 at server 12. */
function view(servers = [11, 11, 12, 12], epoch = 1) {
  return {
    ranges: servers.map((primaryNodeId, rangeId) =>
      ({ rangeId, primaryNodeId, assignmentEpoch: epoch })),
  };
}

let window;

beforeEach(() => {
  window = new PushWindow({ windowBytes: 1000 });
  window.observe(view());
  window.streamOpened(11);
  window.streamOpened(12);
});

function submit(clock, { blocks = [0, 1, 2, 3], bytes = 10, ...terms } = {}) {
  const step = new Step(layout, { clock, codec: 'C', kind: 'K', terms: { ...TERMS, ...terms } });
  const payload = Buffer.alloc(bytes);
  window.submit(step, blocks.map((block) => ({ block, payload, presence: Buffer.alloc(0) })));
  return step;
}

function reply(kind, rangeId, sequence, rest = {}) {
  const message = { kind: `REPLY_KIND_${kind}`, tableId: 1, rangeId, sequence, staleness: 0 };
  window.reply(rangeId < 2 ? 11 : 12, { ...message, ...rest }, 0);
}

const commit = (rangeId, sequence, outcome = 'APPLIED', error = null) =>
  reply('COMMITTED', rangeId, sequence, { outcome: `OUTCOME_${outcome}`, error });
const error = (code, retryAfterMs = 0) =>
  ({ error: { code: `ERROR_CODE_${code}`, message: code, retryAfterMs, clock: 0 } });
const blocks = (sent) => sent.filter((each) => each.request.block)
  .map(({ request: { block } }) => [block.block, block.rangeId, block.sequence]);
const seals = (sent) => sent.filter((each) => each.request.seal)
  .map(({ server, request: { seal } }) =>
    [server, seal.skip, seal.ranges.map((range) => [range.rangeId, range.sequence])]);

function receiveAll() {
  for (const [, rangeId, sequence] of blocks(window.take(0))) reply('RECEIVED', rangeId, sequence);
}

test('sequences count pushes and seals of a range together, from 1', () => {
  submit(1);
  assert.deepEqual(blocks(window.take(0)), [[0, 0, 1], [1, 2, 1], [2, 0, 2], [3, 3, 1]]);
  submit(2);
  assert.deepEqual(blocks(window.take(0)), [[0, 0, 4], [1, 2, 3], [2, 0, 5], [3, 3, 3]]);
});

test('seals leave when every block is received, one message a server', () => {
  submit(1);
  const sent = blocks(window.take(0));
  for (const [, rangeId, sequence] of sent.slice(1)) reply('RECEIVED', rangeId, sequence);
  assert.deepEqual(window.take(0), []);
  reply('RECEIVED', 0, 1);
  assert.deepEqual(seals(window.take(0)), [[11, false, [[0, 3]]], [12, false, [[2, 2], [3, 2]]]]);
});

test('a step without blocks seals every range of the table at once', () => {
  submit(1, { blocks: [], skip: true });
  assert.deepEqual(seals(window.take(0)), [[11, true, [[0, 1]]], [12, true, [[2, 1], [3, 1]]]]);
});

test('a step ends when all its entries have their outcome', async () => {
  const step = submit(1, { blocks: [1] });
  receiveAll();
  window.take(0);
  reply('COMMITTED', 2, 1, { outcome: 'OUTCOME_APPLIED', staleness: 3 });
  commit(0, 1);
  commit(2, 2);
  assert.match(step.describeOpen(), /^1 of 4 entries .*: seal \(range 3, sent\)$/);
  commit(3, 1);
  assert.deepEqual(await step.done, { clock: 1, applied: true, staleness: 3 });
});

test('an invalid block makes all seals of its step skip', async () => {
  const step = submit(1);
  const [first, ...others] = blocks(window.take(0));
  commit(first[1], first[2], 'INVALID', error('INVALID_TENSOR').error);
  for (const [, rangeId, sequence] of others) reply('RECEIVED', rangeId, sequence);
  const sent = seals(window.take(0));
  assert.deepEqual(sent.map(([, skip]) => skip), [true, true]);
  for (const [rangeId, sequence] of [[2, 1], [0, 2], [3, 1]]) commit(rangeId, sequence, 'SKIPPED');
  for (const [rangeId, sequence] of [[0, 3], [2, 2], [3, 2]]) commit(rangeId, sequence);
  await assert.rejects(step.done, { code: 'INVALID_TENSOR' });
});

test('an invalid seal is followed by one with skip under the next number', async () => {
  const step = submit(1, { blocks: [] });
  window.take(0);
  commit(0, 1, 'INVALID', error('INVALID_CONFIG').error);
  assert.deepEqual(seals(window.take(0)), [[11, true, [[0, 2]]]]);
  for (const [rangeId, sequence] of [[0, 2], [2, 1], [3, 1]]) commit(rangeId, sequence);
  await assert.rejects(step.done, { code: 'INVALID_CONFIG' });
});

for (const [code, skip] of [['EDIT_REFUSED', false], ['UPDATE_FAILED', true]]) {
  test(`a step that ends with ${code} is over: no seal follows, and the client lives`, async () => {
    const step = submit(1, { blocks: [0, 3] });
    receiveAll();
    window.take(0);
    for (const [rangeId, sequence] of [[0, 1], [0, 2], [2, 1]]) {
      commit(rangeId, sequence, 'INVALID', error(code).error);
    }
    window.streamBroke(12);
    window.streamOpened(12);
    const sent = window.take(0);
    assert.deepEqual(blocks(sent), [[3, 3, 1]]);
    assert.deepEqual(seals(sent), [[12, skip, [[3, 2]]]]);
    for (const sequence of [1, 2]) commit(3, sequence, 'INVALID', error(code).error);
    await assert.rejects(step.done, { code });
    assert.deepEqual(window.take(0), []);
    submit(2, { blocks: [1] });
    assert.deepEqual(blocks(window.take(0)), [[1, 2, 2]]);
  });
}

test('a step whose last seal cannot even be skipped rejects, and the error comes out', async () => {
  const step = submit(1, { blocks: [], skip: true });
  window.take(0);
  for (const rangeId of [0, 2]) commit(rangeId, 1);
  const refused = error('INVALID_CONFIG').error;
  assert.throws(() => commit(3, 1, 'INVALID', refused), { code: 'INVALID_CONFIG' });
  window.abandon(Object.assign(new Error('gone'), { code: 'NOT_PERMITTED' }));
  await assert.rejects(step.done, { code: 'INVALID_CONFIG' });
});

test('initial values with an invalid block come to nothing; the next replace them', async () => {
  const step = submit(0);
  const replaced = (sent) => sent.filter((each) => each.request.block)
    .map(({ request: { block } }) => block.replaces);
  assert.deepEqual(replaced(window.take(0)), [0, 0, 0, 0]);
  commit(2, 1, 'INVALID', error('INVALID_TENSOR').error);
  for (const place of [[0, 1], [0, 2], [3, 1]]) reply('RECEIVED', ...place);
  assert.deepEqual(seals(window.take(0)), [[11, true, [[0, 3]]], [12, true, [[2, 2], [3, 2]]]]);
  for (const [rangeId, sequence] of [[0, 3], [2, 2], [3, 2]]) {
    commit(rangeId, sequence, 'INVALID', error('INVALID_CONFIG').error);
  }
  await assert.rejects(step.done, { code: 'INVALID_TENSOR' });
  const again = submit(0);
  const sent = window.take(0);
  assert.deepEqual(blocks(sent), [[0, 0, 4], [1, 2, 3], [2, 0, 5], [3, 3, 3]]);
  assert.deepEqual(replaced(sent), [1, 1, 2, 1]);
  for (const place of [[0, 1], [0, 2], [3, 1]]) commit(...place, 'REPLACED');
  for (const [, rangeId, sequence] of blocks(sent)) reply('RECEIVED', rangeId, sequence);
  assert.deepEqual(seals(window.take(0)), [[11, false, [[0, 6]]], [12, false, [[2, 4], [3, 4]]]]);
  for (const place of [[0, 4], [0, 5], [0, 6], [2, 3], [2, 4], [3, 3], [3, 4]]) commit(...place);
  assert.equal((await again.done).applied, true);
});

test('after a refusal the table waits for credit at that server, and only there', () => {
  submit(1);
  window.take(0);
  reply('REFUSED', 0, 1, error('OVERLOADED', 500));
  reply('GIVEN_BACK', 3, 1, error('OVERLOADED', 400));
  assert.deepEqual(window.take(0), []);
  assert.equal(window.nextTakeMs(0), 400);
  reply('CREDIT', 0, 0);
  assert.deepEqual(blocks(window.take(0)), [[0, 0, 1]]);
  assert.deepEqual(blocks(window.take(400)), [[3, 3, 1]]);
});

test('after its stream broke a server is sent what it had refused at once', () => {
  submit(1, { blocks: [0] });
  window.take(0);
  reply('REFUSED', 0, 1, error('OVERLOADED', 500));
  window.streamBroke(11);
  window.streamOpened(11);
  assert.deepEqual(blocks(window.take(0)), [[0, 0, 1]]);
});

test('a block that is given back after its seal left goes again alone', () => {
  submit(1, { blocks: [0] });
  receiveAll();
  assert.equal(seals(window.take(0)).length, 2);
  reply('GIVEN_BACK', 0, 1, error('OVERLOADED', 10));
  const sent = window.take(10);
  assert.deepEqual([blocks(sent), seals(sent)], [[[0, 0, 1]], []]);
});

test('a broken stream sends all that has no outcome again, to that server only', () => {
  submit(1);
  receiveAll();
  window.take(0);
  commit(0, 1);
  window.streamBroke(11);
  assert.deepEqual(window.take(0), []);
  window.streamOpened(11);
  const sent = window.take(0);
  assert.deepEqual(blocks(sent), [[2, 0, 2]]);
  assert.deepEqual(seals(sent), [[11, false, [[0, 3]]]]);
  assert.equal(sent[0].request.block.confirmedSequence, 1);
});

test('a stale assignment is tried again later, under the new epoch', () => {
  submit(1, { blocks: [0] });
  window.take(0);
  reply('ERROR', 0, 1, error('STALE_ASSIGNMENT'));
  assert.deepEqual(window.take(0), []);
  window.observe(view([11, 11, 12, 12], 2));
  const [{ server, request }] = window.take(window.nextTakeMs(0));
  assert.deepEqual([server, request.block.sequence, request.block.assignmentEpoch], [11, 1, 2]);
});

test('a range that moves takes its entries along', () => {
  submit(1, { blocks: [0] });
  window.take(0);
  window.observe(view([12, 11, 12, 12], 2));
  const [{ server, request }] = window.take(0);
  assert.deepEqual([server, request.block.sequence], [12, 1]);
});

test('a server that may have given a range up in between is sent its entries again', () => {
  submit(1, { blocks: [0, 3] });
  receiveAll();
  window.take(0);
  window.observe(view([11, 11, 12, 12], 3));
  assert.deepEqual(window.take(0), []);
  const later = view([11, 11, 12, 12], 3);
  later.ranges[0].assignmentEpoch = 6;
  window.observe(later);
  const [first, ...rest] = window.take(0);
  assert.deepEqual([blocks([first]), first.request.block.assignmentEpoch], [[[0, 0, 1]], 6]);
  assert.deepEqual(seals(rest), [[11, false, [[0, 2]]]]);
});

test('an error that no retry mends comes out', () => {
  submit(1);
  window.take(0);
  assert.throws(() => reply('ERROR', 0, 1, error('FENCED')), { code: 'FENCED' });
});

test('bytes in flight stay within the window; one block may always go', () => {
  submit(1, { bytes: 600 });
  assert.deepEqual(blocks(window.take(0)), [[0, 0, 1]]);
  assert.equal(window.inFlightBytes, 600);
  reply('RECEIVED', 0, 1);
  assert.equal(window.inFlightBytes, 0);
  assert.deepEqual(blocks(window.take(0)), [[1, 2, 1]]);
  submit(2, { bytes: 5000 });
  assert.deepEqual(window.take(0), []);
});

test('replies about entries that have ended change nothing', () => {
  submit(1, { blocks: [] });
  window.take(0);
  commit(0, 1);
  commit(0, 1);
  reply('RECEIVED', 0, 1);
  reply('ERROR', 0, 1, error('FENCED'));
});

test('abandoned steps are rejected', async () => {
  const step = submit(1);
  window.abandon(Object.assign(new Error('gone'), { code: 'NOT_PERMITTED' }));
  await assert.rejects(step.done, { code: 'NOT_PERMITTED' });
});
