import { toHex } from './hash.ts';
import type { JsonObject } from './json.ts';
import { KvSender, readSpec } from './kv-sender.ts';
import type { SimConfig } from './options.ts';
import { PdBuffer, type ReceiverPorts } from './pd-buffer.ts';
import type { EngineRequest, Sequence } from './sequence.ts';
import type { SideChannelClient } from './side-channel.ts';

/** LMCache in one engine life (its in-process prefill/decode mode): prefill engines send, decode engines receive. */
export class LmcacheSide {
  readonly buffer: PdBuffer;
  readonly sender: KvSender;
  private readonly config: SimConfig;

  constructor(config: SimConfig, compat: string, peers: SideChannelClient) {
    this.config = config;
    this.buffer = new PdBuffer(compat, config.pdBufferTokens);
    const { clock, noticeEndpoint: endpoint, ranks, allocTimeoutMs } = config;
    const notices = config.noticeCount ?? ranks;
    this.sender = new KvSender({ peers, clock, endpoint, compat, ranks, notices, allocTimeoutMs });
  }

  /** Opens the receiver's ports of a decode engine. */
  listen(ports: ReceiverPorts): Promise<ReceiverPorts> {
    return this.config.role === 'prefill' ? Promise.resolve(ports) : this.buffer.listen(this.config.sideHost, ports);
  }

  async close(): Promise<void> {
    await Promise.all([this.buffer.close(), this.sender.close()]);
  }

  /** What a prefill engine dies of when it is sent this request. */
  whyFatal({ kv }: EngineRequest): string | undefined {
    if (this.config.role !== 'prefill') return undefined;
    const spec = readSpec(kv, this.config.ranks);
    return typeof spec === 'string' ? spec : undefined;
  }

  /** Takes the prompt's KV from the buffer if it is there; how many tokens of the prompt are computed then. */
  receive(sequence: Sequence, { prompt, partition, skipCache }: EngineRequest): number {
    const slots = skipCache || this.config.role === 'prefill' ? undefined : this.buffer.take(prompt, toHex(partition));
    if (slots === undefined || slots.tokens.length <= sequence.hitTokens) return sequence.hitTokens;
    const count = slots.tokens.length;
    return sequence.store(slots, 0, count, count) === 0 ? count : sequence.hitTokens;
  }

  /** Sends the computed prompt on its way; resolves when it is written and told. */
  send(sequence: Sequence, request: EngineRequest): Promise<void> {
    const spec = readSpec(request.kv, this.config.ranks);
    if (this.config.role !== 'prefill' || typeof spec === 'string') return Promise.resolve();
    const slots = sequence.copySlots(request.prompt.length);
    return this.sender.send(spec, toHex(request.partition), slots, request.noticeFault);
  }

  /** `kv_transfer_params` of the reply. */
  async reply({ kv, noticeFault }: EngineRequest, output: readonly number[], sent: Promise<void> | undefined) {
    if (noticeFault?.kind === 'early') await sent;
    const params: JsonObject | null = kv !== undefined && 'ret_first_tok' in kv ? { first_tok: output[0] ?? 0 } : null;
    return params;
  }
}
