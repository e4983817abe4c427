/** Place of an item in a {@link Heap}; only the heap changes it. */
export interface HeapNode<T> {
  readonly item: T;
  readonly priority: number;
  index: number;
}

/** Smallest priority first; any item leaves in O(log n), so that nothing dead stays behind. */
export class Heap<T> {
  readonly #nodes: HeapNode<T>[] = [];

  get size(): number {
    return this.#nodes.length;
  }

  /** The item with the smallest priority. */
  peek(): HeapNode<T> | undefined {
    return this.#nodes[0];
  }

  push(item: T, priority: number): HeapNode<T> {
    const node = { item, priority, index: this.#nodes.length };
    this.#nodes.push(node);
    this.#rise(node);
    return node;
  }

  /** Takes a node out that `push` of this heap gave and that is still in it. */
  remove(node: HeapNode<T>): void {
    const last = this.#nodes.pop();
    if (last === undefined || last === node) return;
    this.#place(last, node.index);
    this.#sink(last);
    this.#rise(last);
  }

  #place(node: HeapNode<T>, index: number): void {
    node.index = index;
    this.#nodes[index] = node;
  }

  #rise(node: HeapNode<T>): void {
    while (node.index > 0) {
      const parent = this.#nodes[(node.index - 1) >> 1];
      if (parent === undefined || parent.priority <= node.priority) return;
      const index = parent.index;
      this.#place(parent, node.index);
      this.#place(node, index);
    }
  }

  #sink(node: HeapNode<T>): void {
    for (;;) {
      const left = this.#nodes[2 * node.index + 1];
      const right = this.#nodes[2 * node.index + 2];
      const least = right !== undefined && left !== undefined && right.priority < left.priority ? right : left;
      if (least === undefined || least.priority >= node.priority) return;
      const index = least.index;
      this.#place(least, node.index);
      this.#place(node, index);
    }
  }
}
