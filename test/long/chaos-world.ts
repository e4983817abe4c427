import { mkdtemp, rename, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { connectRemote, type RemoteServices } from '../../src/rpc/clients.ts';
import type { SimOptions } from '../../src/sim/options.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { configOf, startQuietly } from '../support/harness.ts';

/** Engines of each pool that the pool file names; one more of each is registered meanwhile. */
const ENGINES = 6;

/** Slow tokens: what is tested is how many streams run, and not how many tokens two cores can make. */
const ENGINE: SimOptions = {
  bidirectional: true,
  numBlocks: 6000,
  maxModelLen: 2500,
  kvLeaseMs: 10_000,
  decoderTtlMs: 20_000,
  fixedMs: 10,
  prefillMsPerToken: 0.1,
  decodeMsPerToken: 120,
};

const YAML = `
pools:
  prefill: { kv_lease: 10s, bidirectional: on }
  decode: { decoder_ttl: 20s }
kv: { lease_margin: 3s }
timeouts: { store: 2s, tokenize: 5s, prefill_cold: 20s, first_content: 20s, idle: 15s, queue: 20s, drain: 5s }
health: { interval: 500ms, timeout: 2s, failures: 2, damping: 500ms }
breaker: { open: 1s }
log: { level: info }
`;

export type PoolRole = 'prefill' | 'decode';

/** Pools that change, baton in front of them, and one engine that tells what every answer must be. */
export class ChaosWorld implements AsyncDisposable {
  readonly url: string;
  readonly adminUrl: string;
  readonly remote: RemoteServices;
  readonly pools: Readonly<Record<PoolRole, readonly Sim[]>>;
  /** Join and leave by registration. */
  readonly guests: Readonly<Record<PoolRole, Sim>>;
  readonly plain: Sim;
  readonly log: readonly Readonly<Record<string, unknown>>[];
  readonly #file: string;
  readonly #stack: AsyncDisposableStack;

  private constructor(
    parts: Pick<ChaosWorld, 'url' | 'adminUrl' | 'remote' | 'pools' | 'guests' | 'plain' | 'log'>,
    file: string,
    stack: AsyncDisposableStack,
  ) {
    ({
      url: this.url,
      adminUrl: this.adminUrl,
      remote: this.remote,
      pools: this.pools,
      guests: this.guests,
      plain: this.plain,
      log: this.log,
    } = parts);
    this.#file = file;
    this.#stack = stack;
  }

  static async start(): Promise<ChaosWorld> {
    await using stack = new AsyncDisposableStack();
    const engine = async (options: SimOptions) => {
      const sim = await startSim(options);
      stack.defer(() => sim.close());
      return sim;
    };
    const pool = (role: PoolRole) => Promise.all(Array.from({ length: ENGINES }, () => engine({ ...ENGINE, role })));
    const pools = { prefill: await pool('prefill'), decode: await pool('decode') };
    const guests = {
      prefill: await engine({ ...ENGINE, role: 'prefill' }),
      decode: await engine({ ...ENGINE, role: 'decode' }),
    };
    const plain = await engine({
      ...ENGINE,
      role: 'both',
      connector: 'none',
      // The clients must not meet the end of a kept connection: nobody repeats what they ask it.
      keepAliveMs: 3_600_000,
      fixedMs: 0,
      prefillMsPerToken: 0,
      decodeMsPerToken: 0,
    });
    const folder = await mkdtemp(join(tmpdir(), 'baton-chaos-'));
    stack.defer(() => rm(folder, { recursive: true, force: true }));
    const file = join(folder, 'pools.yaml');
    await writeFile(file, poolFile([...pools.prefill, ...pools.decode]));
    const { baton, log } = await startQuietly(configOf({ 'pool-file': file }, YAML));
    stack.defer(() => baton.stop());
    const remote = stack.use(connectRemote({ url: `http://${baton.addresses.rpc}` }));
    const { facade, admin } = baton.addresses;
    const parts = { url: `http://${facade}`, adminUrl: `http://${admin}`, remote, pools, guests, plain, log };
    return new ChaosWorld(parts, file, stack.move());
  }

  get engines(): readonly Sim[] {
    return [...this.pools.prefill, ...this.pools.decode, this.guests.prefill, this.guests.decode];
  }

  /** Engines that are out of use because their cache may be poisoned. */
  async distrusted(): Promise<readonly Sim[]> {
    // Also those whose drain has ended, which are GONE and are not listed unless they are asked for.
    const states = [InstanceState.READY, InstanceState.SUSPECT, InstanceState.DRAINING, InstanceState.GONE];
    const { instances } = await this.remote.poolRegistry.listInstances({ pageSize: 100, filter: { states } });
    const ids = new Set(instances.filter(({ stateReason }) => stateReason === 'late_read').map(({ id }) => id));
    return this.engines.filter((sim) => ids.has(hostOf(sim)));
  }

  /** Replaces the pool file as a whole. */
  async rewrite(engines: readonly Sim[], more = ''): Promise<void> {
    await writeFile(`${this.#file}.new`, poolFile(engines) + more);
    await rename(`${this.#file}.new`, this.#file);
  }

  async metrics(): Promise<(name: string) => number> {
    const text = await (await fetch(`${this.adminUrl}/metrics`)).text();
    const lines = text.split('\n');
    return (name) =>
      lines
        .filter((line) => line.startsWith(`${name}{`) || line.startsWith(`${name} `))
        .reduce((sum, line) => sum + Number(line.split(' ').at(-1)), 0);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.#stack.disposeAsync();
  }
}

/** Name of an engine in listings and logs. */
export function hostOf(sim: Sim): string {
  return new URL(sim.url).host;
}

function poolFile(engines: readonly Sim[]): string {
  return `instances:\n${engines.map(({ url, role }) => `  - { url: "${url}", role: ${role} }\n`).join('')}`;
}
