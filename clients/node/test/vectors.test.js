/** The published test vectors, through this client's own code. */

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { decodeInto, encode } from '../src/codecs.js';
import { messageType } from '../src/contract.js';
import { joinProof } from '../src/join_secret.js';
import {
  TableLayout, packPresence, rangeOfSlot, slotOfOrdinal, slotsOfRange,
} from '../src/layout.js';

const vectors = JSON.parse(
  readFileSync(new URL('../../../docs/reference/protocol_vectors.json', import.meta.url), 'utf8'),
);
const number = (value) => (value === 'inf' ? Infinity : value);

test('slots', () => {
  for (const { ordinal, slot } of vectors.slots) assert.equal(slotOfOrdinal(ordinal), slot);
});

test('ranges', () => {
  for (const { range_count: count, ranges, slots } of vectors.ranges) {
    for (const { range, begin_slot: begin, end_slot: end } of ranges) {
      assert.deepEqual(slotsOfRange(range, count), { begin, end });
    }
    for (const { slot, range } of slots) assert.equal(rangeOfSlot(slot, count), range);
  }
});

test('block layouts', () => {
  for (const vector of vectors.layouts) {
    const spec = {
      name: 'vectors',
      elementCount: vector.element_count,
      blockElements: vector.block_elements,
      tensors: vector.tensors,
    };
    const table = { tableId: 1, firstOrdinal: vector.first_ordinal, spec };
    const layout = new TableLayout(table, vector.range_count);
    assert.equal(layout.blockCount, vector.blocks.length);
    for (const expected of vector.blocks) {
      const { begin, end } = layout.bounds(expected.block);
      assert.deepEqual([begin, end - begin], [expected.begin, expected.length]);
      assert.equal(layout.rangeOfBlock[expected.block], expected.range);
      const segments = layout.segments(expected.block);
      assert.deepEqual(
        segments.map((s) => ({ tensor: s.tensor, begin: s.begin, end: s.end })),
        expected.segments,
      );
    }
  }
});

test('presence bitmaps', () => {
  for (const { present, hex } of vectors.presence) {
    assert.equal(packPresence(present).toString('hex'), hex);
  }
});

test('codecs', () => {
  for (const { codec, values, hex, decoded } of vectors.codecs) {
    const name = `CODEC_${codec.toUpperCase()}`;
    const payload = encode(values.map(number), name);
    assert.equal(payload.toString('hex'), hex);
    const out = new Float64Array(values.length);
    decodeInto(payload, name, out);
    assert.deepEqual([...out], decoded.map(number));
  }
});

test('a NaN stays one in every codec', () => {
  for (const codec of ['CODEC_FP32', 'CODEC_FP64', 'CODEC_FP16', 'CODEC_BF16']) {
    const out = new Float64Array(1);
    decodeInto(encode([NaN], codec), codec, out);
    assert.ok(Number.isNaN(out[0]), codec);
  }
});

test('every binary16 survives a round trip', () => {
  const payload = Buffer.from(Uint16Array.from({ length: 0x7c01 }, (_, i) => i).buffer);
  const out = new Float64Array(0x7c01);
  decodeInto(payload, 'CODEC_FP16', out);
  assert.deepEqual(encode(out, 'CODEC_FP16'), payload);
});

test('the proof of the join secret', () => {
  const { secret, challenge, registration_id: id, role, rank, address, join_proof } = vectors.join;
  const who = { registrationId: Buffer.from(id, 'hex'), role, requestedRank: rank, address };
  const proof = joinProof(secret, Buffer.from(challenge, 'hex'), who);
  assert.equal(proof.toString('hex'), join_proof);
});

test('a payload whose length lies is refused', () => {
  const refused = { code: 'INVALID_TENSOR', message: /has 7 bytes; expected 8/ };
  assert.throws(() => decodeInto(Buffer.alloc(7), 'CODEC_FP32', new Float32Array(2)), refused);
});

test('the worked messages mean what the page says', () => {
  const found = Object.fromEntries(
    vectors.messages.map(({ name, type, hex }) => {
      const bytes = Buffer.from(hex, 'hex');
      return [name, messageType(type.replace('pushpull.v1.', '')).deserialize(bytes)];
    }),
  );
  assert.equal(found['push-block'].block.sequence, 1);
  assert.equal(found['push-seal'].seal.ranges[0].sequence, 2);
  assert.deepEqual(
    found['push-committed'].replies.map((r) => [r.kind, r.sequence, r.outcome]),
    [1, 2].map((sequence) => ['REPLY_KIND_COMMITTED', sequence, 'OUTCOME_APPLIED']),
  );
  const values = new Float32Array(3);
  decodeInto(found['pull-response'].block.payload, 'CODEC_FP32', values);
  assert.deepEqual([...values], [-0.5, 1, -0.25]);
});
