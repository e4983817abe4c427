/** Bytes of a cell: of each byte string half a cell is lost on average. */
const CELL_BYTES = 128;
/** Cells that are got from the system at once are two to this power: 1 MiB. */
const SLAB_BITS = 13;
const SLAB_CELLS = 1 << SLAB_BITS;
/** No cell: where an empty byte string lies, and behind the last cell of one. */
export const NO_CELL = -1;

interface Slab {
  readonly bytes: Buffer;
  /** The cell that follows each one. */
  readonly next: Int32Array;
}

/**
 * Keeps many byte strings in few arrays: an array of its own costs each one some 300 bytes and the garbage collector
 * its time. A string lies in a chain of cells, so any free cells will do and nothing has to be moved. Memory that was
 * once needed is kept for later strings.
 */
export class CellPool {
  readonly #slabs: Slab[] = [];
  /** Free cells that were used before. */
  #free = NO_CELL;
  /** The first cell that never was. */
  #unused = 0;

  /** Keeps a copy of the parts, one behind the other; returns the first cell. */
  write(parts: readonly Uint8Array[]): number {
    let first = NO_CELL;
    let cell = NO_CELL;
    let filled = CELL_BYTES;
    for (const part of parts) {
      for (let from = 0; from < part.length; ) {
        if (filled === CELL_BYTES) {
          const next = this.#acquire();
          if (cell === NO_CELL) first = next;
          else this.#follow(cell, next);
          cell = next;
          filled = 0;
        }
        const length = Math.min(CELL_BYTES - filled, part.length - from);
        this.#slab(cell).bytes.set(part.subarray(from, from + length), offsetOf(cell) + filled);
        from += length;
        filled += length;
      }
    }
    return first;
  }

  /** A copy of `length` bytes from `offset` on, which must be there. */
  read(first: number, offset: number, length: number): Uint8Array<ArrayBuffer> {
    const bytes = new Uint8Array(length);
    let cell = first;
    for (let skipped = CELL_BYTES; skipped <= offset; skipped += CELL_BYTES) cell = this.#after(cell);
    let from = offset % CELL_BYTES;
    for (let at = 0; at < length; ) {
      const take = Math.min(CELL_BYTES - from, length - at);
      const start = offsetOf(cell) + from;
      bytes.set(this.#slab(cell).bytes.subarray(start, start + take), at);
      at += take;
      from = 0;
      if (at < length) cell = this.#after(cell);
    }
    return bytes;
  }

  /** `length` bytes from `offset` on as UTF-8; the ends must not be within a character. */
  text(first: number, offset: number, length: number): string {
    if (length === 0) return '';
    const start = offsetOf(first) + offset;
    // Most texts are in one cell, and need no copy.
    if (offset + length <= CELL_BYTES) return this.#slab(first).bytes.toString('utf8', start, start + length);
    return Buffer.from(this.read(first, offset, length).buffer).toString();
  }

  /** Whether the first bytes are these, which must not be more than there are. */
  startsWith(first: number, wanted: Uint8Array): boolean {
    let cell = first;
    for (let at = 0; at < wanted.length; cell = this.#after(cell)) {
      const take = Math.min(CELL_BYTES, wanted.length - at);
      const start = offsetOf(cell);
      if (this.#slab(cell).bytes.compare(wanted, at, at + take, start, start + take) !== 0) return false;
      at += take;
    }
    return true;
  }

  /** Gives up all but the first `length` bytes; returns the first cell of what is left. */
  cut(first: number, length: number): number {
    if (first === NO_CELL) return NO_CELL;
    if (length === 0) {
      this.#release(first);
      return NO_CELL;
    }
    let last = first;
    for (let kept = CELL_BYTES; kept < length; kept += CELL_BYTES) last = this.#after(last);
    const rest = this.#after(last);
    this.#follow(last, NO_CELL);
    if (rest !== NO_CELL) this.#release(rest);
    return first;
  }

  #acquire(): number {
    let cell = this.#free;
    if (cell === NO_CELL) {
      cell = this.#unused;
      this.#unused += 1;
      if ((cell & (SLAB_CELLS - 1)) === 0) {
        this.#slabs.push({ bytes: Buffer.alloc(SLAB_CELLS * CELL_BYTES), next: new Int32Array(SLAB_CELLS) });
      }
    } else {
      this.#free = this.#after(cell);
    }
    this.#follow(cell, NO_CELL);
    return cell;
  }

  #release(first: number): void {
    let last = first;
    for (let next = this.#after(last); next !== NO_CELL; next = this.#after(last)) last = next;
    this.#follow(last, this.#free);
    this.#free = first;
  }

  #after(cell: number): number {
    return this.#slab(cell).next[cell & (SLAB_CELLS - 1)] ?? NO_CELL;
  }

  #follow(cell: number, next: number): void {
    this.#slab(cell).next[cell & (SLAB_CELLS - 1)] = next;
  }

  #slab(cell: number): Slab {
    const slab = this.#slabs[cell >> SLAB_BITS];
    if (slab === undefined) throw new Error('bytes are looked for that are not kept');
    return slab;
  }
}

function offsetOf(cell: number): number {
  return (cell & (SLAB_CELLS - 1)) * CELL_BYTES;
}
