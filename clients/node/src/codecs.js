/** Payloads: raw little-endian arrays (docs/reference/PROTOCOL.md, "Payloads"). */

import { PushpullError } from './errors.js';

/** @typedef {Float32Array | Float64Array} Values */

/** @type {Record<string, string>} */
const CODEC_OF_DTYPE = {
  DTYPE_FLOAT32: 'CODEC_FP32',
  DTYPE_FLOAT16: 'CODEC_FP16',
  DTYPE_BFLOAT16: 'CODEC_BF16',
  DTYPE_FLOAT64: 'CODEC_FP64',
};

const bits = new DataView(new ArrayBuffer(4));

/**
 * The codec of a table's own element type.
 *
 * @param {string} dtype a name of pushpull.v1.DType
 */
export function nativeCodec(dtype) {
  const codec = CODEC_OF_DTYPE[dtype];
  if (!codec) throw new PushpullError('INVALID_TENSOR', `dtype is ${dtype}; expected a float type`);
  return codec;
}

/**
 * The two bytes of a bfloat16, rounded to nearest even; a NaN stays one.
 *
 * @param {number} value
 */
function toBfloat16(value) {
  bits.setFloat32(0, value);
  const word = bits.getUint32(0);
  if (Number.isNaN(value)) return (word >>> 16) | 0x40;
  return ((word + 0x7fff + ((word >>> 16) & 1)) / 0x10000) & 0xffff;
}

/** @param {number} half the two bytes of a bfloat16 */
function fromBfloat16(half) {
  bits.setUint32(0, half * 0x10000);
  return bits.getFloat32(0);
}

/**
 * The two bytes of a binary16, rounded to nearest even.
 *
 * Scaling by a power of two is exact, so the only rounding is that of the integer conversion.
 *
 * @param {number} value
 */
function toBinary16(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  if (size < 2 ** -14) return sign | roundToEven(size * 2 ** 24);
  let exponent = Math.floor(Math.log2(size));
  if (2 ** exponent > size) exponent -= 1;
  if (2 ** (exponent + 1) <= size) exponent += 1;
  const mantissa = roundToEven((size * 2 ** -exponent - 1) * 1024);
  return sign | (((exponent + 15) << 10) + mantissa);
}

/** @param {number} half the two bytes of a binary16 */
function fromBinary16(half) {
  const sign = half & 0x8000 ? -1 : 1;
  const exponent = (half >> 10) & 0x1f;
  const mantissa = half & 0x3ff;
  if (exponent === 0x1f) return mantissa ? NaN : sign * Infinity;
  if (exponent === 0) return sign * mantissa * 2 ** -24;
  return sign * (1 + mantissa / 1024) * 2 ** (exponent - 15);
}

/** @param {number} value not negative, below 2^31 */
function roundToEven(value) {
  const low = Math.floor(value);
  const rest = value - low;
  return rest > 0.5 || (rest === 0.5 && low % 2 === 1) ? low + 1 : low;
}

/**
 * @typedef {object} CodecShape
 * @property {number} bytes of one element
 * @property {(view: DataView, at: number, value: number) => void} put
 * @property {(view: DataView, at: number) => number} take
 */

/** @type {Record<string, CodecShape>} */
const SHAPES = {
  CODEC_FP32: {
    bytes: 4,
    put: (view, at, value) => view.setFloat32(at, value, true),
    take: (view, at) => view.getFloat32(at, true),
  },
  CODEC_FP64: {
    bytes: 8,
    put: (view, at, value) => view.setFloat64(at, value, true),
    take: (view, at) => view.getFloat64(at, true),
  },
  CODEC_FP16: {
    bytes: 2,
    put: (view, at, value) => view.setUint16(at, toBinary16(value), true),
    take: (view, at) => fromBinary16(view.getUint16(at, true)),
  },
  CODEC_BF16: {
    bytes: 2,
    put: (view, at, value) => view.setUint16(at, toBfloat16(value), true),
    take: (view, at) => fromBfloat16(view.getUint16(at, true)),
  },
};

/** @param {string} codec a name of pushpull.v1.Codec */
function shapeOf(codec) {
  const shape = SHAPES[codec];
  if (!shape) {
    const expected = Object.keys(SHAPES).join(', ');
    throw new PushpullError('INVALID_TENSOR', `codec is ${codec}; expected one of ${expected}`);
  }
  return shape;
}

/**
 * `values` as a payload of its own memory.
 *
 * @param {ArrayLike<number>} values
 * @param {string} codec
 */
export function encode(values, codec) {
  const shape = shapeOf(codec);
  const payload = Buffer.alloc(values.length * shape.bytes);
  const view = new DataView(payload.buffer, payload.byteOffset, payload.byteLength);
  for (let index = 0; index < values.length; index += 1) {
    shape.put(view, index * shape.bytes, values[index]);
  }
  return payload;
}

/**
 * Puts a payload's values into `out`, which it must fill exactly.
 *
 * @param {Buffer} payload
 * @param {string} codec
 * @param {Values} out
 */
export function decodeInto(payload, codec, out) {
  const shape = shapeOf(codec);
  if (payload.length !== out.length * shape.bytes) {
    throw new PushpullError(
      'INVALID_TENSOR',
      `payload has ${payload.length} bytes; expected ${out.length * shape.bytes} (${codec})`,
    );
  }
  const view = new DataView(payload.buffer, payload.byteOffset, payload.byteLength);
  for (let index = 0; index < out.length; index += 1) {
    out[index] = shape.take(view, index * shape.bytes);
  }
}

/**
 * An array that holds a table's values without loss.
 *
 * @param {string} dtype a name of pushpull.v1.DType
 * @param {number} elementCount
 * @returns {Values}
 */
export function valuesFor(dtype, elementCount) {
  return new (dtype === 'DTYPE_FLOAT64' ? Float64Array : Float32Array)(elementCount);
}
