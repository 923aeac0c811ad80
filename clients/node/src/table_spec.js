/** Tables as their creators describe them (docs/reference/PROTOCOL.md, "Tables"). */

import { encode, nativeCodec } from './codecs.js';
import { PushpullError } from './errors.js';
import { elementsOf } from './layout.js';

/**
 * @typedef {object} TableOptions
 * @property {string} name unique in the cluster
 * @property {number} [elementCount] needed unless `tensors` says it
 * @property {[string, number[]][]} [tensors] names and shapes, in order
 * @property {'float32' | 'float16' | 'bfloat16' | 'float64'} [dtype] float32 by default
 * @property {number} [blockElements] a multiple of 64; 262144 by default
 * @property {{kind: string, hyperparameters?: Record<string, number>, nesterov?: boolean,
 *   amsgrad?: boolean, centered?: boolean, maximize?: boolean, innerSteps?: number,
 *   kernels?: 'fast' | 'exact', customUpdate?: string}} optimizer
 *   `kind` is SGD, ADAM, ADAMW, ADAGRAD, RMSPROP, AGGREGATE, ASSIGN, ADD, or CUSTOM with the name of
 *   an update of the servers' as `customUpdate`
 * @property {'bsp' | 'asp'} [consistency] bsp by default
 * @property {'zeros' | 'fromRankZero' | {constant: number} | {inline: ArrayLike<number>}}
 *   [initializer] zeros by default
 * @property {'mean' | 'sum'} [reduction] mean by default
 * @property {boolean} [allowNonFinite]
 * @property {number} [gateBytes]
 */

/** @param {[string, number[]][]} tensors */
function layoutOf(tensors) {
  let offset = 0;
  return tensors.map(([name, shape]) => {
    const tensor = { name, shape, offset };
    offset += elementsOf(shape);
    return tensor;
  });
}

/**
 * @param {NonNullable<TableOptions['initializer']>} initializer
 * @param {string} dtype
 */
function initializerOf(initializer, dtype) {
  if (initializer === 'zeros') return { zeros: {} };
  if (initializer === 'fromRankZero') return { fromRankZero: {} };
  if ('constant' in initializer) return { constant: { value: initializer.constant } };
  return { inline: { values: encode(initializer.inline, nativeCodec(dtype)) } };
}

/**
 * The message that describes a table.
 *
 * @param {TableOptions} options
 */
export function tableSpec(options) {
  const { name, consistency = 'bsp', initializer = 'zeros', reduction = 'mean' } = options;
  const dtype = `DTYPE_${(options.dtype ?? 'float32').toUpperCase()}`;
  const tensors = layoutOf(options.tensors ?? []);
  const last = tensors.at(-1);
  const count = last && last.offset + elementsOf(last.shape);
  const elementCount = options.elementCount ?? count;
  if (elementCount === undefined) {
    throw new PushpullError('INVALID_CONFIG', `table '${name}' needs elementCount or tensors`);
  }
  const { kind, hyperparameters: numbers = {}, kernels = 'fast', ...flags } = options.optimizer;
  return {
    name,
    dtype,
    elementCount,
    blockElements: options.blockElements ?? 0,
    tensors,
    optimizer: {
      kind: `OPTIMIZER_KIND_${kind}`,
      kernels: `KERNEL_KIND_${kernels.toUpperCase()}`,
      hyperparameters: Object.entries(numbers).map(([key, value]) => ({ name: key, value })),
      ...flags,
    },
    consistency: { [consistency]: {} },
    initializer: initializerOf(initializer, dtype),
    reduction: `REDUCTION_${reduction.toUpperCase()}`,
    allowNonFinite: options.allowNonFinite ?? false,
    gateBytes: options.gateBytes ?? 0,
  };
}
