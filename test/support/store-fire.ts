import { setTimeout } from 'node:timers/promises';
import { create } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import {
  type MissReason,
  PutEntryRequestSchema,
  TakeEntryRequestSchema,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { buildChain } from '../../src/core/chain.ts';
import { decodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { connectRemote, type RemoteServices } from '../../src/rpc/clients.ts';
import { sha256 } from '../../src/services/sha256.ts';
import { type BatonProcess, startBatonProcess } from './baton-process.ts';
import { ids } from './kv-store.ts';

const TOKENS = ids(128);
const SEED = { model: 'm', adapter: '', cacheSalt: '' };
const CHAIN = buildChain(TOKENS, SEED, sha256);
const keyOf = (index: number) => ({ tenant: '', ...SEED, conversationId: `c${index}` });

interface StoreNode {
  readonly url: string;
  process: BatonProcess | undefined;
  client: RemoteServices | undefined;
}

/** What one handle went through: claims that were delivered, and whether one of them was, or may have been, put back. */
interface Life {
  readonly claims: Set<string>;
  held: boolean;
  given: number;
}

/** Store processes on Redis, which are killed and come back, and callers that never give up. */
export class Fire implements AsyncDisposable {
  readonly lives = new Map<string, Life>();
  /** Handles that were delivered while somebody had them; stays empty. */
  readonly twice: string[] = [];
  kills = 0;
  failures = 0;
  readonly #nodes: readonly StoreNode[];
  #calls = 0;

  private constructor(nodes: readonly StoreNode[]) {
    this.#nodes = nodes;
  }

  /** Starts one store process before each of these Redis addresses, `host:port`. */
  static async start(addresses: readonly string[]): Promise<Fire> {
    const fire = new Fire(addresses.map((url) => ({ url, process: undefined, client: undefined })));
    await Promise.all(fire.#nodes.map((node) => fire.#startNode(node)));
    return fire;
  }

  async #startNode(node: StoreNode): Promise<void> {
    const args = ['--roles', 'kvstore', '--store', 'valkey', '--valkey-url', `redis://${node.url}`];
    node.process = await startBatonProcess(args);
    node.client = connectRemote({ url: `http://${node.process.rpc}` });
  }

  /** Kills one process after the other, at chance, and starts it again, until `over`. */
  async rage(over: () => boolean): Promise<void> {
    while (!over()) {
      await setTimeout(100 + Math.random() * 400);
      const node = this.#nodes[Math.floor(Math.random() * this.#nodes.length)];
      const { process, client } = node ?? {};
      if (node === undefined || process === undefined) continue;
      this.kills += 1;
      node.client = undefined;
      node.process = undefined;
      await process.end('SIGKILL');
      client?.[Symbol.dispose]();
      await this.#startNode(node);
    }
  }

  /** Calls some process until one answers, with the same request each time. */
  async #insist<T>(
    call: (client: RemoteServices['kvCacheStore']) => Promise<T>,
    tries: number,
  ): Promise<T | undefined> {
    for (let attempt = 0; attempt < tries; attempt++) {
      const { client } = this.#nodes[Math.floor(Math.random() * this.#nodes.length)] ?? {};
      if (client !== undefined) {
        try {
          return await call(client.kvCacheStore);
        } catch {
          this.failures += 1;
        }
      }
      await setTimeout(20 + Math.random() * 80);
    }
    return undefined;
  }

  /** Stores handle `index` under a key of its own. */
  async put(index: number): Promise<void> {
    const handle = decodeKvTransferParams(
      Buffer.from(
        `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[${ids(TOKENS.length / 16, index + 1)}]],"remote_engine_id":"e_dp0",` +
          `"remote_request_id":"h${index}","remote_host":"10.0.0.2","remote_port":5601,"tp_size":1}`,
      ),
    );
    if (handle === undefined) throw new Error('not a handle');
    const request = create(PutEntryRequestSchema, {
      idempotencyKey: `put-${index}`,
      key: keyOf(index),
      owner: { instanceId: 'd', engineId: 'e_dp0', incarnation: { engineId: 'e', generation: 1 } },
      connector: 'nixl',
      handle,
      storedTokens: TOKENS.length,
      chain: CHAIN,
      engineBlockSize: 16,
      remainingTtl: durationFromMs(600_000),
    });
    const stored = await this.#insist((client) => client.putEntry(request, { timeoutMs: 3000 }), 200);
    if (stored === undefined) throw new Error(`handle ${index} could not be stored`);
  }

  /** Takes from key `index`; undefined if nobody answered, `given` or why not. Some claims are put back. */
  async take(index: number, tries = 8): Promise<'given' | MissReason | undefined> {
    const request = create(TakeEntryRequestSchema, {
      idempotencyKey: `take-${++this.#calls}`,
      key: keyOf(index),
      prompt: { case: 'tokenIds', value: { tokenIds: TOKENS } },
    });
    const { result } = (await this.#insist((client) => client.takeEntry(request, { timeoutMs: 3000 }), tries)) ?? {};
    if (result === undefined) return undefined;
    if (result.case !== 'taken') return result.value?.reason;
    const { claimId, handle } = result.value;
    const life = this.#note(handle?.remoteRequestId ?? '', claimId);
    if (Math.random() < 0.1) {
      // From here on it may be given again, whether the answer comes or not.
      life.held = false;
      await this.#insist((client) => client.releaseClaim({ claimId, reason: 'not_sent' }, { timeoutMs: 3000 }), 3);
    } else await this.#insist((client) => client.commitClaim({ claimId }, { timeoutMs: 3000 }), 3);
    return 'given';
  }

  #note(handle: string, claimId: string): Life {
    const life = this.lives.get(handle) ?? { claims: new Set(), held: false, given: 0 };
    this.lives.set(handle, life);
    if (!life.claims.has(claimId)) {
      if (life.held) this.twice.push(handle);
      life.given += 1;
    }
    life.claims.add(claimId);
    life.held = true;
    return life;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const { client, process } of this.#nodes) {
      client?.[Symbol.dispose]();
      await process?.end('SIGTERM');
    }
  }
}
