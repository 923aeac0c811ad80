/**
 * Linear regression as one worker of several, in whatever languages the others are written.
 *
 *     PUSHPULL_SCHEDULER=host:port node examples/linear_regression.js --steps 100
 *
 * Each worker has its own samples of one line; the servers average the gradients. tests/system runs
 * it beside a Python worker.
 */

import { parseArgs } from 'node:util';

import { PushpullClient } from '../src/index.js';

const FEATURE_COUNT = 255;
const SAMPLE_COUNT = 512;
const REPORT_STEPS = 20;

const { values: flags } = parseArgs({
  options: {
    rank: { type: 'string' },
    steps: { type: 'string', default: '100' },
    lr: { type: 'string', default: '0.5' },
    'gate-bytes': { type: 'string', default: '0' },
    'print-parameters': { type: 'boolean', default: false },
  },
});

/**
 * Numbers between -1.7 and 1.7 of variance 1, the same for the same seed.
 *
 * @param {number} seed
 */
function* noise(seed) {
  let state = seed >>> 0;
  for (;;) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    yield (state / 2 ** 31 - 1) * Math.sqrt(3);
  }
}

/** The line to be found: weight j, and at the end the bias. */
const LINE = Float64Array.from({ length: FEATURE_COUNT + 1 }, (_, j) => (((j * 37) % 11) - 5) / 5);

/**
 * This worker's samples: features with a 1 at the end, and what the line makes of them.
 *
 * @param {number} rank
 */
function samples(rank) {
  const numbers = noise(1 + rank);
  return Array.from({ length: SAMPLE_COUNT }, () => {
    const x = Float64Array.from({ length: FEATURE_COUNT + 1 }, () => numbers.next().value ?? 0);
    x[FEATURE_COUNT] = 1;
    return { x, y: dot(x, LINE) };
  });
}

/**
 * @param {ArrayLike<number>} a
 * @param {ArrayLike<number>} b
 */
function dot(a, b) {
  let sum = 0;
  for (let j = 0; j < a.length; j += 1) sum += a[j] * b[j];
  return sum;
}

/**
 * Half the mean squared error, and its gradient.
 *
 * @param {ArrayLike<number>} parameters
 * @param {{x: Float64Array, y: number}[]} batch
 */
function lossAndGradient(parameters, batch) {
  const gradient = new Float64Array(parameters.length);
  let loss = 0;
  for (const { x, y } of batch) {
    const error = (dot(x, parameters) - y) / batch.length;
    loss += (error * error * batch.length) / 2;
    for (let j = 0; j < x.length; j += 1) gradient[j] += error * x[j];
  }
  return { loss, gradient };
}

const rank = flags.rank === undefined ? undefined : Number(flags.rank);
const client = await PushpullClient.connect(undefined, { rank });
const table = await client.createTable({
  name: 'line',
  tensors: [['weight', [1, FEATURE_COUNT]], ['bias', [1]]],
  blockElements: 64,
  gateBytes: Number(flags['gate-bytes']),
  optimizer: { kind: 'SGD', hyperparameters: { lr: Number(flags.lr) } },
});
const batch = samples(client.rank);
for (let step = 1; step <= Number(flags.steps); step += 1) {
  const { loss, gradient } = lossAndGradient(await client.pull(table), batch);
  await client.push(table, gradient);
  if (step % REPORT_STEPS === 0) console.log(`step ${step}: loss ${loss.toExponential(3)}`);
}
const parameters = await client.pull(table);
await client.leave();
const { loss } = lossAndGradient(parameters, batch);
console.log(`rank ${client.rank} of ${client.workerCount} ends with loss ${loss.toExponential(3)}`);
if (flags['print-parameters']) console.log(Buffer.from(parameters.buffer).toString('hex'));
