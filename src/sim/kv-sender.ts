import { type SimClock, sleepOn } from './clock.ts';
import { isInteger, isObject, type JsonObject } from './json.ts';
import type { NoticeSocket } from './notice-socket.ts';
import type { PeerSlots, SideChannelClient } from './side-channel.ts';

/** Where a prefill engine writes a prompt's KV: `kv_transfer_params.disagg_spec`. */
export interface DisaggSpec {
  readonly transferId: string;
  readonly host: string;
  readonly initPorts: readonly number[];
  readonly allocPorts: readonly number[];
}

/** What an injected fault does to the notices of one transfer. */
export type NoticeFault =
  | { readonly kind: 'lost' | 'early' | 'doubled' | 'foreign' | 'unwritten' }
  | { readonly kind: 'late'; readonly ms: number };

/** Reads the spec; a string says what makes the engine die of it. */
export function readSpec(kv: JsonObject | undefined, ranks: number): DisaggSpec | string {
  const spec = kv?.['disagg_spec'];
  if (!isObject(spec)) return 'a request without disagg_spec';
  const id = spec['req_id'];
  const host = spec['receiver_host'];
  const init = spec['receiver_init_port'];
  const alloc = spec['receiver_alloc_port'];
  if (typeof id !== 'string' || typeof host !== 'string') return 'KeyError in disagg_spec';
  if (!Array.isArray(init) || !Array.isArray(alloc)) return 'TypeError in disagg_spec';
  if (!init.every(isInteger) || !alloc.every(isInteger)) return 'TypeError in disagg_spec';
  if (init.length < ranks || alloc.length < ranks) return 'IndexError in disagg_spec';
  return { transferId: id, host, initPorts: init, allocPorts: alloc };
}

/** What a sender works with. */
export interface KvSenderDeps {
  readonly peers: SideChannelClient;
  readonly clock: SimClock;
  readonly endpoint: string | undefined;
  readonly compat: string;
  /** Worker processes: each writes its part and sends its notice. */
  readonly ranks: number;
  /** Notices of one prefill; fewer than ranks where only some of them store (MLA). */
  readonly notices: number;
  readonly allocTimeoutMs: number;
}

const retryMs = 10;

/** A prefill engine's side of a hand-over: writes KV into the decode engine's buffer and tells the router. */
export class KvSender {
  private readonly deps: KvSenderDeps;
  private socket: Promise<NoticeSocket> | undefined;
  private closed = false;
  /** Transfers that failed: no notice follows. */
  failed = 0;

  constructor(deps: KvSenderDeps) {
    this.deps = deps;
  }

  /** Resolves when all is written and told; never rejects. */
  async send(spec: DisaggSpec, partition: string, slots: PeerSlots, fault: NoticeFault | undefined): Promise<void> {
    const written = fault?.kind !== 'unwritten' && (await this.write(spec, partition, slots));
    if (!written) {
      this.failed += 1;
      return;
    }
    if (fault?.kind === 'late') await sleepOn(this.deps.clock, fault.ms);
    if (fault?.kind !== 'lost') await this.tell(spec.transferId, fault);
  }

  /** Drops the socket and what it still holds. */
  async close(): Promise<void> {
    this.closed = true;
    (await this.socket)?.close();
  }

  private async write(spec: DisaggSpec, partition: string, slots: PeerSlots): Promise<boolean> {
    const { peers, ranks, compat, clock, allocTimeoutMs } = this.deps;
    const { host, transferId } = spec;
    const hello = { op: 'done', engineId: '', requestId: transferId } as const;
    const until = clock.now() + allocTimeoutMs;
    for (let rank = 0; rank < ranks; rank += 1) {
      const shaken = await peers.ask(host, spec.initPorts[rank] ?? 0, hello);
      if (shaken.error !== null) return false;
      const put = { op: 'put', engineId: '', requestId: transferId, compat, partition, slots } as const;
      for (;;) {
        const reply = await peers.ask(host, spec.allocPorts[rank] ?? 0, put);
        if (reply.error === null) break;
        if (reply.error !== 'full' || clock.now() >= until || this.closed) return false;
        await sleepOn(clock, retryMs);
      }
    }
    return true;
  }

  private async tell(transferId: string, fault: NoticeFault | undefined): Promise<void> {
    const { endpoint, notices } = this.deps;
    if (endpoint === undefined || this.closed) return;
    const { encodeNotice, NoticeSocket } = await import('./notice-socket.ts');
    this.socket ??= Promise.resolve(new NoticeSocket(endpoint));
    const socket = await this.socket;
    if (fault?.kind === 'foreign') {
      await socket.send(encodeNotice(`${transferId}-of-another`));
      await socket.send(Uint8Array.of(0xc1), new TextEncoder().encode('{"req_id":1}'));
    }
    for (let i = 0; i < notices + (fault?.kind === 'doubled' ? 1 : 0); i += 1)
      await socket.send(encodeNotice(transferId));
  }
}
