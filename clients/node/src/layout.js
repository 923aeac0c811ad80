/** Where the blocks of a table live, and which tensors lie in them (docs/reference/PROTOCOL.md). */

const SLOT_COUNT = 65536;
const GOLDEN = 40503;

/**
 * The slot of the block with global ordinal `ordinal`.
 *
 * @param {number} ordinal
 */
export function slotOfOrdinal(ordinal) {
  return ((ordinal % SLOT_COUNT) * GOLDEN) % SLOT_COUNT;
}

/**
 * The slots of one of `rangeCount` ranges: from `begin`, inclusive, to `end`, exclusive.
 *
 * @param {number} range
 * @param {number} rangeCount
 */
export function slotsOfRange(range, rangeCount) {
  const bound = (/** @type {number} */ index) => Math.floor((index * SLOT_COUNT) / rangeCount);
  return { begin: bound(range), end: bound(range + 1) };
}

/**
 * The range, of `rangeCount`, that contains `slot`.
 *
 * @param {number} slot
 * @param {number} rangeCount
 */
export function rangeOfSlot(slot, rangeCount) {
  return Math.floor(((slot + 1) * rangeCount - 1) / SLOT_COUNT);
}

/**
 * The bitmap of `present`, lowest bit of the first byte first; empty if all are present.
 *
 * @param {boolean[]} present
 */
export function packPresence(present) {
  if (present.every(Boolean)) return Buffer.alloc(0);
  const bitmap = Buffer.alloc(Math.ceil(present.length / 8));
  present.forEach((isPresent, index) => {
    if (isPresent) bitmap[index >> 3] |= 1 << (index & 7);
  });
  return bitmap;
}

/**
 * The elements of a tensor; 1 for a scalar.
 *
 * @param {number[]} shape
 */
export function elementsOf(shape) {
  return shape.reduce((product, size) => product * size, 1);
}

/** A table as the cluster knows it, cut into blocks. */
export class TableLayout {
  /**
   * @param {any} table a pushpull.v1.Table
   * @param {number} rangeCount the number of ranges in the view
   */
  constructor(table, rangeCount) {
    this.tableId = table.tableId;
    this.spec = table.spec;
    this.name = table.spec.name;
    this.elementCount = table.spec.elementCount;
    this.blockElements = table.spec.blockElements;
    /** Whether it is an embedding table, whose blocks are partitions of rows. */
    this.isOfRows = Boolean(table.spec.rows);
    this.blockCount = table.spec.rows?.partitionCount
      ?? Math.ceil(this.elementCount / this.blockElements);
    /** The range of each block. @type {number[]} */
    this.rangeOfBlock = Array.from({ length: this.blockCount }, (_, block) =>
      rangeOfSlot(slotOfOrdinal(table.firstOrdinal + block), rangeCount));
    /** The ranges that hold blocks of the table: those that every step seals. */
    this.ranges = [...new Set(this.rangeOfBlock)].sort((a, b) => a - b);
  }

  /**
   * The elements of a block.
   *
   * @param {number} block
   */
  bounds(block) {
    const begin = block * this.blockElements;
    return { begin, end: Math.min(begin + this.blockElements, this.elementCount) };
  }

  /**
   * The overlaps of the table's tensors with a block, counted from the block's start.
   *
   * @param {number} block
   */
  segments(block) {
    const { begin, end } = this.bounds(block);
    const found = [];
    for (const [index, tensor] of this.spec.tensors.entries()) {
      const low = Math.max(tensor.offset, begin);
      const high = Math.min(tensor.offset + elementsOf(tensor.shape), end);
      if (low < high) {
        found.push({ tensor: index, name: tensor.name, begin: low - begin, end: high - begin });
      }
    }
    return found;
  }
}
