/** Room in a decode instance's buffer, or why there is none. */
export type BufferTicket =
  | { readonly kind: 'taken'; readonly release: () => void }
  /** Larger than the whole buffer. */
  | { readonly kind: 'too_large' }
  | { readonly kind: 'timeout' }
  | { readonly kind: 'gone' };

/** Sizes of {@link BufferAdmission}. */
export interface BufferSizes {
  /** Tokens of one slot: engines allocate whole chunks. */
  readonly chunkTokens: number;
  /** Slots of an instance's buffer; infinite where it is not limited. */
  readonly slotsOf: (instanceId: string) => number;
}

interface Waiting {
  readonly slots: number;
  readonly admit: () => void;
}

interface Buffer {
  used: number;
  readonly waiting: Waiting[];
}

/**
 * Lets no more prompts on their way to a decode instance than its buffer holds: a full buffer makes P wait for D, D for
 * baton and baton for P. Slots are held until D has taken the KV out; requests wait in order of arrival.
 */
export class BufferAdmission {
  readonly #sizes: BufferSizes;
  readonly #buffers = new Map<string, Buffer>();

  constructor(sizes: BufferSizes) {
    this.#sizes = sizes;
  }

  /** Slots in use on an instance. */
  used(instanceId: string): number {
    return this.#buffers.get(instanceId)?.used ?? 0;
  }

  /** Takes room for a prompt, waiting at most `timeoutMs` (0: no limit). The release is harmless when repeated. */
  take(instanceId: string, tokens: number, signal: AbortSignal, timeoutMs: number): Promise<BufferTicket> {
    const slots = Math.max(1, Math.ceil(tokens / this.#sizes.chunkTokens));
    if (slots > this.#sizes.slotsOf(instanceId)) return Promise.resolve({ kind: 'too_large' });
    if (signal.aborted) return Promise.resolve({ kind: 'gone' });
    const buffer = this.#buffers.get(instanceId) ?? { used: 0, waiting: [] };
    this.#buffers.set(instanceId, buffer);
    return new Promise((resolve) => {
      let timer: NodeJS.Timeout | undefined;
      const settle = (ticket: BufferTicket) => {
        clearTimeout(timer);
        signal.removeEventListener('abort', leave);
        resolve(ticket);
      };
      const entry: Waiting = {
        slots,
        admit: () => settle({ kind: 'taken', release: this.#releaser(instanceId, buffer, slots) }),
      };
      const giveUp = (kind: 'timeout' | 'gone') => {
        const at = buffer.waiting.indexOf(entry);
        if (at >= 0) buffer.waiting.splice(at, 1);
        settle({ kind });
        // Whoever waited behind a large prompt may fit.
        this.#admit(instanceId, buffer);
      };
      const leave = () => giveUp('gone');
      signal.addEventListener('abort', leave, { once: true });
      if (timeoutMs > 0) timer = setTimeout(() => giveUp('timeout'), timeoutMs);
      buffer.waiting.push(entry);
      this.#admit(instanceId, buffer);
    });
  }

  #releaser(instanceId: string, buffer: Buffer, slots: number): () => void {
    let held = true;
    return () => {
      if (!held) return;
      held = false;
      buffer.used -= slots;
      this.#admit(instanceId, buffer);
    };
  }

  #admit(instanceId: string, buffer: Buffer): void {
    const limit = this.#sizes.slotsOf(instanceId);
    for (let next = buffer.waiting[0]; next !== undefined; next = buffer.waiting[0]) {
      if (buffer.used + next.slots > limit) return;
      buffer.waiting.shift();
      buffer.used += next.slots;
      next.admit();
    }
  }
}
