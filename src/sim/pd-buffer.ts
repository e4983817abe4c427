import type { PeerReply, PeerRequest, PeerSlots } from './side-channel.ts';
import { SideChannelServer } from './side-channel.ts';

type Put = Extract<PeerRequest, { op: 'put' }>;

interface Stored {
  readonly partition: string;
  readonly slots: PeerSlots;
  readonly ranks: Set<number>;
}

/** Ports on which a decode engine takes KV, one of each kind a rank. */
export interface ReceiverPorts {
  readonly init: readonly number[];
  readonly alloc: readonly number[];
}

/**
 * LMCache's buffer of a decode engine: prefill engines write into it rank by rank, and only a request that retrieves a
 * prompt takes it out again. What nobody retrieves stays.
 */
export class PdBuffer {
  private readonly compat: string;
  private readonly limit: number;
  private readonly stored = new Map<string, Stored>();
  private readonly servers: SideChannelServer[] = [];
  private ranks = 0;

  /** @param limit tokens that fit. */
  constructor(compat: string, limit: number) {
    this.compat = compat;
    this.limit = limit;
  }

  /** Prompts that are in the buffer. */
  get size(): number {
    return this.stored.size;
  }

  /** Tokens in the buffer. */
  get tokens(): number {
    return [...this.stored.values()].reduce((sum, { slots }) => sum + slots.tokens.length, 0);
  }

  /** Opens the ports (0 = any); rejects if one is in use. */
  async listen(host: string, ports: ReceiverPorts): Promise<ReceiverPorts> {
    this.ranks = ports.alloc.length;
    const open = async (port: number, answer: (request: PeerRequest) => PeerReply) => {
      const server = new SideChannelServer(answer);
      this.servers.push(server);
      return server.listen(host, port);
    };
    const init: number[] = [];
    const alloc: number[] = [];
    for (const port of ports.init) init.push(await open(port, () => ({ error: null, slots: null })));
    for (const [rank, port] of ports.alloc.entries()) {
      alloc.push(await open(port, (request) => this.answer(request, rank)));
    }
    return { init, alloc };
  }

  async close(): Promise<void> {
    this.stored.clear();
    await Promise.all(this.servers.splice(0).map((server) => server.close()));
  }

  /**
   * Takes a prompt's KV out: looked for is all but the last token (`skip_last_n_tokens: 1`), which is the one that the
   * prefill engine generated. Undefined where not every rank has written.
   */
  take(prompt: readonly number[], partition: string): PeerSlots | undefined {
    for (const [id, entry] of this.stored) {
      const { tokens } = entry.slots;
      if (entry.partition !== partition || entry.ranks.size < this.ranks || tokens.length !== prompt.length - 1)
        continue;
      if (!tokens.every((token, i) => token === prompt[i])) continue;
      this.stored.delete(id);
      return entry.slots;
    }
    return undefined;
  }

  private answer(request: PeerRequest, rank: number): PeerReply {
    if (request.op !== 'put') return { error: 'operation' };
    if (request.compat !== this.compat) return { error: 'incompatible' };
    return this.store(request, rank);
  }

  private store({ requestId, partition, slots }: Put, rank: number): PeerReply {
    const known = this.stored.get(requestId);
    if (known === undefined && this.tokens + slots.tokens.length > this.limit) return { error: 'full' };
    const entry = known ?? { partition, slots, ranks: new Set<number>() };
    this.stored.set(requestId, entry);
    entry.ranks.add(rank);
    return { error: null, slots: null };
  }
}
