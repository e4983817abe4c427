import { createHash } from 'node:crypto';
import { create } from '@bufbuild/protobuf';
import { type Entry, EntryKeySchema } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { connectRemote, type RemoteServices } from '../../src/rpc/clients.ts';
import { createRandom, type FaultRule } from '../../src/sim/faults.ts';
import type { SimModel, SimOptions } from '../../src/sim/options.ts';
import type { Sim } from '../../src/sim/start-sim.ts';
import type { SimState } from '../../src/sim/state.ts';
import { type Harness, startHarness } from '../support/harness.ts';
import { Draw, MALFORMED } from './property-requests.ts';
import type { ModelKey } from './reuse-model.ts';

/** One set of engines and what goes wrong with them. */
export interface WorldOptions {
  readonly name: string;
  readonly turns: number;
  readonly workers: number;
  readonly prefill: number;
  readonly decode: number;
  readonly engine: Omit<SimOptions, 'role' | 'port' | 'sidePort' | 'models'>;
  readonly bidirectional: 'on' | 'auto';
  /** What baton is told of the decode engines' limit. */
  readonly toldTtlMs: number;
  /** Share of turns before which faults are set. */
  readonly faults: number;
  readonly outages: boolean;
}

/** How long the store keeps an entry, as the design has it. */
export function storeTtlMs({ toldTtlMs }: WorldOptions): number {
  return toldTtlMs - Math.min(30_000, toldTtlMs / 3);
}

const LEASE_MS = 2500;
/** Least turns between two outages: on a slow machine, too, most turns meet none. */
const CALM_TURNS = 25;

const yamlOf = ({ toldTtlMs, bidirectional }: WorldOptions) => `
pools:
  prefill: { kv_lease: ${LEASE_MS}ms, bidirectional: ${bidirectional} }
  decode: { decoder_ttl: ${toldTtlMs}ms }
kv: { lease_margin: 2s }
timeouts: { store: 2s, tokenize: 10s, prefill_warm: 20s, prefill_cold: 20s, first_content: 20s, queue: 10s, drain: 5s }
health: { interval: 150ms, timeout: 3s, failures: 2 }
retry: { budget_percent: 100 }
log: { level: info }
reuse: { autolink: false }
`;

/** Names of a worker: faults are set by name, so that they hit the requests of that worker alone. */
export function modelsOf(worker: number): readonly [string, string, string] {
  return [`alpha-${worker}`, `beta-${worker}`, `lora-${worker}`];
}

/** Root of the adapter that a name stands for. */
export function adapterOf(model: string): string {
  return model.startsWith('lora-') ? `adapters/${model}` : '';
}

function servedModels(workers: number): readonly SimModel[] {
  return Array.from({ length: workers }, (_, worker) => {
    const [alpha, beta, lora] = modelsOf(worker);
    return [
      { id: alpha, root: 'alpha' },
      { id: beta, root: 'beta' },
      { id: lora, root: adapterOf(lora), parent: alpha },
    ];
  }).flat();
}

/** Counts what may never happen, over all lives of the engines. */
export class Harm {
  readonly counts = {
    mismatchedPulls: 0,
    leakedPins: 0,
    leakedBlocks: 0,
    expiredReads: 0,
    doubleReads: 0,
    hung: 0,
  };
  readonly deaths: string[] = [];
  refusedReads = 0;
  pulls = 0;
  pulledTokens = 0;
  preemptions = 0;

  add(state: SimState): void {
    for (const key of Object.keys(this.counts) as (keyof Harm['counts'])[]) this.counts[key] += state[key];
    this.refusedReads += state.refusedReads;
    this.pulls += state.pulls;
    this.pulledTokens += state.pulledTokens;
    this.preemptions += state.preemptions;
    if (state.deathReason !== null && state.deathReason !== 'injected') this.deaths.push(state.deathReason);
  }
}

/** A time in which an engine was away, or another one than baton believed. */
export interface Outage {
  readonly from: number;
  until: number;
  /** The instance, and whether what it held is lost. */
  readonly instance: string;
  readonly isLost: boolean;
}

/** Engines, baton in front of them, and what the test knows of both. */
export class World implements AsyncDisposable {
  readonly options: WorldOptions;
  readonly harness: Harness;
  readonly remote: RemoteServices;
  readonly harm = new Harm();
  readonly outages: Outage[] = [];
  /** Lines of the log that were looked at for breakers, and the pairs whose breaker is open. */
  #logRead = 0;
  readonly #openPairs = new Set<string>();
  readonly #lines = new Map<string, Readonly<Record<string, unknown>>>();
  #read = 0;

  private constructor(options: WorldOptions, harness: Harness) {
    this.options = options;
    this.harness = harness;
    this.remote = connectRemote({ url: harness.rpcUrl });
  }

  static async start(options: WorldOptions, seed: number): Promise<World> {
    const { prefill, decode, workers, engine } = options;
    const models = servedModels(workers);
    const harness = await startHarness({
      prefill,
      decode,
      engine: { ...engine, models, kvLeaseMs: LEASE_MS, seed },
      yaml: yamlOf(options),
    });
    await harness.ready();
    return new World(options, harness);
  }

  get engines(): readonly Sim[] {
    return [...this.harness.prefill, ...this.harness.decode];
  }

  /** The access-log line of a request, once it is there. */
  line(id: string): Readonly<Record<string, unknown>> | undefined {
    const { log } = this.harness;
    for (; this.#read < log.length; this.#read += 1) {
      const line = log[this.#read];
      if (line?.['msg'] === 'request') this.#lines.set(String(line['request_id']), line);
    }
    return this.#lines.get(id);
  }

  get lines(): readonly Readonly<Record<string, unknown>>[] {
    this.line('');
    return [...this.#lines.values()];
  }

  /** Live entries of a conversation, as any caller of the store sees them. */
  async entriesOf(key: ModelKey): Promise<readonly Entry[]> {
    const { tenant, model, adapter, salt, conversation } = key;
    const value = create(EntryKeySchema, { tenant, model, adapter, cacheSalt: salt, conversationId: conversation });
    return (await this.remote.kvCacheStore.getEntry({ selector: { case: 'key', value } })).entries;
  }

  /** Whether some prefill engine has not yet shown that it can read, or lately failed to: then there may be no reader. */
  async isOnTrial(): Promise<boolean> {
    if (this.options.faults > 0 && this.#hasOpenPair()) return true;
    if (this.options.bidirectional === 'on') return false;
    const { instances } = await this.remote.poolRegistry.listInstances({});
    const readers = new Set(this.harness.prefill.map(({ url }) => url));
    return instances.some(({ url, kv }) => readers.has(url) && kv?.bidirectional !== 'on');
  }

  /** A prefill engine that failed to read from a decode engine lately is not asked to; then there may be no reader. */
  #hasOpenPair(): boolean {
    // The log tells each breaker that opens or closes, at once; only what is new is read.
    for (; this.#logRead < this.harness.log.length; this.#logRead += 1) {
      const { msg, scope, prefillId, decodeId } = this.harness.log[this.#logRead] ?? {};
      if (scope !== 'pair') continue;
      const pair = `${String(prefillId)} ${String(decodeId)}`;
      if (msg === 'a breaker has closed') this.#openPairs.delete(pair);
      else this.#openPairs.add(pair);
    }
    return this.#openPairs.size > 0;
  }

  outagesDuring(from: number, until: number): readonly Outage[] {
    return this.outages.filter((outage) => outage.from <= until && outage.until >= from);
  }

  /** Whether baton may have found since `from` that a decode engine lost what it held; an outage lasts until it knows. */
  lostSince(from: number): boolean {
    const owners = new Set(this.harness.decode.map(({ url }) => new URL(url).host));
    return this.outages.some(({ until: end, isLost, instance }) => isLost && end >= from && owners.has(instance));
  }

  async metrics(): Promise<(name: string, label?: string) => number> {
    const text = await (await fetch(`${this.harness.adminUrl}/metrics`)).text();
    const lines = text.split('\n');
    return (name, label = '') =>
      lines
        .filter((line) => line.startsWith(`${name}{`) && line.includes(label))
        .reduce((sum, line) => sum + Number(line.split(' ').at(-1)), 0);
  }

  /** Takes one engine away at a time until told to stop. */
  async makeOutages(draw: Draw, isOver: () => boolean): Promise<Record<string, number>> {
    const made: Record<string, number> = {};
    while (!isOver()) {
      const calmUntil = this.#countEnded() + CALM_TURNS;
      await wait(draw.int(700, 2000));
      while (!isOver() && this.#countEnded() < calmUntil) await wait(20);
      const pool = draw.chance(0.4) ? this.harness.prefill : this.harness.decode;
      const sim = pool[draw.int(0, pool.length - 1)];
      if (sim === undefined || isOver()) continue;
      const kind = draw.pick(['crash', 'core', 'refuse', 'restart']);
      made[kind] = (made[kind] ?? 0) + 1;
      const instance = new URL(sim.url).host;
      const outage = { from: performance.now(), until: Number.POSITIVE_INFINITY, instance, isLost: kind !== 'refuse' };
      this.outages.push(outage);
      if (kind === 'refuse') {
        await sim.setFault({ kind: 'refuse' });
        await wait(draw.int(10, 300));
        await sim.clearFaults();
      } else {
        const { generation } = await this.#lifeOf(instance);
        if (kind === 'core') {
          await sim.setFault({ kind: 'crash' });
          while (!sim.state().killed && !isOver()) await wait(5);
        }
        if (kind !== 'restart') await sim.crash();
        const ended = sim.state();
        if (kind === 'crash') await wait(draw.int(0, 300));
        await sim.restart();
        await sim.clearFaults();
        this.harm.add(ended);
        while ((await this.#lifeOf(instance)).generation === generation) await wait(20);
      }
      // Of a new life only some is known at first.
      while (!(await this.#lifeOf(instance)).isKnown) await wait(20);
      await this.harness.ready();
      outage.until = performance.now();
    }
    return made;
  }

  #countEnded(): number {
    this.line('');
    return this.#lines.size;
  }

  async #lifeOf(instance: string): Promise<{ readonly generation: number; readonly isKnown: boolean }> {
    const { instances } = await this.remote.poolRegistry.listInstances({});
    const found = instances.find(({ id }) => id === instance);
    const { version = '', blockSize = 0, templateFingerprint = '' } = found?.engine ?? {};
    const isKnown = version !== '' && blockSize > 0 && templateFingerprint !== '';
    return { generation: found?.incarnation?.generation ?? 0, isKnown };
  }

  /** Sets faults for the next requests of a worker. */
  async injectFaults(draw: Draw, worker: number): Promise<void> {
    for (let i = draw.int(1, 2); i > 0; i -= 1) {
      const rule = drawFault(draw, draw.pick([...modelsOf(worker)] as [string, string, string]));
      const pool = rule.leg === 'decode' ? this.harness.decode : this.harness.prefill;
      for (const sim of pool) if (draw.chance(0.7)) await sim.setFault(rule);
    }
  }

  /** Hits left of each fault that is set for a worker, by engine. */
  faultsLeft(worker: number): ReadonlyMap<string, { readonly rule: FaultRule; readonly left: number }> {
    const left = new Map<string, { readonly rule: FaultRule; readonly left: number }>();
    for (const [index, sim] of this.engines.entries()) {
      for (const [place, fault] of sim.state().faults.entries()) {
        const rule = fault as unknown as FaultRule & { readonly left: number };
        if (rule.model?.endsWith(`-${worker}`)) left.set(`${index}.${place}`, { rule, left: rule.left });
      }
    }
    return left;
  }

  async clearFaults(): Promise<void> {
    for (const sim of this.engines) await sim.clearFaults();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.remote[Symbol.dispose]();
    await this.harness[Symbol.asyncDispose]();
  }
}

function drawFault(draw: Draw, model: string): FaultRule {
  const leg = draw.pick(['prefill', 'prefill', 'prefill', 'decode', 'decode', 'decode', 'plain'] as const);
  const common = { leg, model, count: draw.int(1, 2) };
  const status = { ...common, kind: 'status', status: draw.pick([400, 429, 500, 500, 502, 503]) } as const;
  const stall = { ...common, kind: 'stall', ms: draw.int(10, 250) } as const;
  const slow = { ...common, kind: 'slow', ms: draw.int(1, 6) } as const;
  const reset = { ...common, kind: 'reset' } as const;
  if (leg === 'plain') return { ...draw.pick<FaultRule>([status, reset, stall]), path: '/tokenize' };
  const patched = { ...common, kind: 'patch_handle', patch: draw.pick(MALFORMED) ?? {} } as const;
  const unread = { ...common, kind: 'load_failure' } as const;
  const none = { ...common, kind: 'no_handle' } as const;
  if (leg === 'prefill')
    return draw.pick<FaultRule>([status, stall, slow, reset, reset, patched, unread, unread, none]);
  const events = draw.int(0, 6);
  const stampless = { ...common, kind: 'patch_handle', patch: { remote_blocks_expiry_time: undefined } } as const;
  return draw.pick<FaultRule>([
    status,
    stall,
    slow,
    reset,
    patched,
    stampless,
    unread,
    none,
    { ...common, kind: 'reset_stream', events },
    { ...common, kind: 'end_stream', events },
    { ...common, kind: 'error_event', events },
    { ...common, kind: 'no_done' },
  ]);
}

/** Faults after which a request must still be answered as if nothing had been. */
export function isHarmless({ kind, leg }: FaultRule, severalChoices: boolean): boolean {
  // What a prefill engine cannot load it was told of by a handle: it is asked again without.
  if (leg === 'plain' || (leg === 'prefill' && kind === 'load_failure')) return true;
  if (kind === 'no_done') return !severalChoices;
  return ['no_handle', 'patch_handle', 'slow', 'stall'].includes(kind);
}

/** Tenant of a credential where no keys are configured. */
export function tenantOf(credential: string | undefined): string {
  if (credential === undefined) return 'anonymous';
  return `cred-${createHash('sha256').update(credential).digest('hex').slice(0, 32)}`;
}

export function drawOf(seed: number): Draw {
  return new Draw(createRandom(seed));
}

export function wait(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Polls until the value is there or time is up. */
export async function until<T>(read: () => T | undefined | Promise<T | undefined>, ms: number): Promise<T | undefined> {
  const end = performance.now() + ms;
  for (;;) {
    const value = await read();
    if (value !== undefined || performance.now() > end) return value;
    await wait(2);
  }
}
