import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type Instance, InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { createLogger } from '../../src/obs/log.ts';
import { startBaton } from '../../src/roles.ts';
import { connectRemote, type RemoteServices } from '../../src/rpc/clients.ts';
import type { TemplateKind } from '../../src/sim/chat-template.ts';
import type { SimOptions } from '../../src/sim/options.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { configOf, post } from '../support/harness.ts';
import { hostOf } from './chaos-world.ts';
import type { Draw } from './property-requests.ts';
import { Harm, until, wait } from './reuse-world.ts';

const BLOCKS = 5000;
const DECODER_TTL_MS = 24_000;
const START_MS = 3000;

/** Everything that makes a history other tokens than the engines hold, at once. */
const ENGINE: SimOptions = {
  bidirectional: true,
  reasoning: true,
  tokenizer: 'pairs',
  asyncScheduling: true,
  runtimeAdapters: true,
  numBlocks: BLOCKS,
  maxModelLen: 2500,
  eosEvery: 24,
  tokensPerEvent: 4,
  kvLeaseMs: 30_000,
  decoderTtlMs: DECODER_TTL_MS,
  models: [
    { id: 'sim-model', root: 'base' },
    { id: 'style-a', root: '/adapters/a', parent: 'sim-model' },
    { id: 'style-b', root: '/adapters/b', parent: 'sim-model' },
  ],
};

const YAML = `
pools:
  prefill: { bidirectional: on }
  decode: { decoder_ttl: ${DECODER_TTL_MS}ms }
timeouts: { store: 2s, tokenize: 10s, prefill_warm: 30s, prefill_cold: 30s, first_content: 30s, queue: 15s, drain: 5s }
health: { interval: 500ms, timeout: 5s, failures: 2 }
retry: { budget_percent: 100 }
log: { level: warn }
`;

export const ADAPTERS = ['style-a', 'style-b'] as const;
export const TEMPLATES = ['plain', 'preamble', 'tools-last'] as const satisfies readonly TemplateKind[];

/** How a world of the soak differs from the one that is guarded. */
export interface SoakOptions {
  readonly flags?: Readonly<Record<string, string>>;
}

/**
 * Engines whose chat template, adapters and pictures change while clients talk, baton in front of them, and one engine for
 * each template that tells what every answer must be: it computes every token of its own.
 */
export class SoakWorld implements AsyncDisposable {
  readonly url: string;
  readonly adminUrl: string;
  readonly remote: RemoteServices;
  readonly prefill: readonly Sim[];
  readonly decode: readonly Sim[];
  readonly plain: ReadonlyMap<TemplateKind, Sim>;
  readonly harm = new Harm();
  readonly done = { rollouts: 0, rude: 0, breaches: 0, reloads: 0, pictures: 0 };
  /** Lines of the log from `warn` on, by message. */
  readonly warnings: Readonly<Record<string, number>>;
  readonly #templates = new Map<Sim, TemplateKind>();
  /** Ends of times in which an engine was away, or another one than baton believed. */
  #lastOutage = Number.NEGATIVE_INFINITY;
  #outages = 0;
  /** Versions of pictures, by the path of their link. */
  readonly #pictures: Map<string, number>;
  readonly picturesUrl: string;
  readonly #folder: string;
  readonly #users = new Map<string, number>();
  readonly #closed = new Map<string, Promise<void>>();
  readonly #stack: AsyncDisposableStack;

  private constructor(
    parts: Pick<SoakWorld, 'url' | 'adminUrl' | 'remote' | 'prefill' | 'decode' | 'plain' | 'picturesUrl' | 'warnings'>,
    pictures: Map<string, number>,
    folder: string,
    stack: AsyncDisposableStack,
  ) {
    ({
      url: this.url,
      adminUrl: this.adminUrl,
      remote: this.remote,
      prefill: this.prefill,
      decode: this.decode,
      plain: this.plain,
      picturesUrl: this.picturesUrl,
      warnings: this.warnings,
    } = parts);
    this.#pictures = pictures;
    this.#folder = folder;
    this.#stack = stack;
    for (const sim of this.engines) this.#templates.set(sim, 'plain');
  }

  static async start({ flags = {} }: SoakOptions = {}): Promise<SoakWorld> {
    await using stack = new AsyncDisposableStack();
    const engine = async (options: SimOptions) => {
      const sim = await startSim({ ...ENGINE, ...options });
      stack.defer(() => sim.close());
      return sim;
    };
    // Ranks are chosen by the engine, request by request: ids of one engine alternate.
    const pool = (role: 'prefill' | 'decode') =>
      Promise.all([2, 2, 1].map((dataParallel) => engine({ role, dataParallel })));
    const prefill = await pool('prefill');
    const decode = await pool('decode');
    const plain = new Map<TemplateKind, Sim>();
    for (const template of TEMPLATES) {
      plain.set(template, await engine({ role: 'both', connector: 'none', template, keepAliveMs: 3_600_000 }));
    }
    const pictures = new Map<string, number>();
    // No picture is missing because a kept connection ends at that moment.
    const server = createServer({ keepAliveTimeout: 3_600_000 }, (request, response) => {
      const path = request.url ?? '';
      response.writeHead(200, { 'content-type': 'image/png' }).end(`${path} ${pictures.get(path) ?? 0}`);
    });
    const port = await new Promise<number>((resolve, reject) => {
      server.listen(0, '127.0.0.1', () => {
        const address = server.address();
        if (typeof address === 'object' && address !== null) resolve(address.port);
        else reject(new Error('the server of pictures has no port'));
      });
    });
    stack.defer(() => {
      server.closeAllConnections();
      server.close();
    });
    const folder = await mkdtemp(join(tmpdir(), 'baton-soak-'));
    stack.defer(() => rm(folder, { recursive: true, force: true }));
    const config = configOf(
      { prefill: prefill.map(({ url }) => url), decode: decode.map(({ url }) => url), ...flags },
      YAML,
    );
    const warnings: Record<string, number> = {};
    const destination = {
      write: (line: string) => {
        const { msg } = JSON.parse(line) as { msg: string };
        warnings[msg] = (warnings[msg] ?? 0) + 1;
      },
    };
    const baton = await startBaton(config, { log: createLogger({ level: 'warn', format: 'json', destination }) });
    stack.defer(() => baton.stop());
    const remote = stack.use(connectRemote({ url: `http://${baton.addresses.rpc}` }));
    const url = `http://${baton.addresses.facade}`;
    const adminUrl = `http://${baton.addresses.admin}`;
    const picturesUrl = `http://127.0.0.1:${port}`;
    const parts = { url, adminUrl, remote, prefill, decode, plain, picturesUrl, warnings };
    const world = new SoakWorld(parts, pictures, folder, stack.move());
    await world.ready();
    return world;
  }

  get engines(): readonly Sim[] {
    return [...this.prefill, ...this.decode];
  }

  /** Templates that engines have now, the most common one first. */
  templates(): readonly TemplateKind[] {
    const counts = Map.groupBy(this.#templates.values(), (template) => template);
    return [...counts].toSorted(([, a], [, b]) => b.length - a.length).map(([template]) => template);
  }

  /** Whether an engine was away at some time since `from`. */
  wasDisturbed(from: number): boolean {
    return this.#outages > 0 || this.#lastOutage + 3000 >= from;
  }

  /** The link's picture is another one from now on: nobody may be asking with it. */
  changePicture(path: string): void {
    this.#pictures.set(path, (this.#pictures.get(path) ?? 0) + 1);
    this.done.pictures += 1;
  }

  /** Runs a request that uses a model; an adapter is not replaced meanwhile. */
  async using<T>(model: string, run: () => Promise<T>): Promise<T> {
    for (let closed = this.#closed.get(model); closed !== undefined; closed = this.#closed.get(model)) await closed;
    this.#users.set(model, (this.#users.get(model) ?? 0) + 1);
    try {
      return await run();
    } finally {
      this.#users.set(model, (this.#users.get(model) ?? 1) - 1);
    }
  }

  /** Other weights under the same name and path, on every engine, while nobody uses them. */
  async reloadAdapter(name: string): Promise<void> {
    const { promise, resolve } = Promise.withResolvers<void>();
    this.#closed.set(name, promise);
    while ((this.#users.get(name) ?? 0) > 0) await wait(5);
    this.done.reloads += 1;
    const path = join(this.#folder, name);
    await writeFile(path, `weights ${this.done.reloads}`);
    for (const { url } of [...this.engines, ...this.plain.values()]) {
      const body = { lora_name: name, lora_path: path, load_inplace: true };
      const { status, text } = await post(`${url}/v1/load_lora_adapter`, body);
      if (status !== 200) throw new Error(text);
    }
    this.#closed.delete(name);
    resolve();
  }

  /**
   * Brings every engine to another template, one after another: most are drained before they restart, the others go in the
   * middle of their work.
   */
  async rollOut(template: TemplateKind, draw: Draw): Promise<void> {
    this.done.rollouts += 1;
    for (const sim of this.engines) {
      const isRude = draw.chance(0.3);
      if (isRude) this.done.rude += 1;
      await this.#restart(sim, template, isRude);
      await wait(draw.int(50, 600));
    }
  }

  async #restart(sim: Sim, template: TemplateKind, isRude: boolean): Promise<void> {
    const { poolRegistry } = this.remote;
    const instanceId = hostOf(sim);
    const generation = (await this.#instance(instanceId)).incarnation?.generation ?? 0;
    if (!isRude) {
      await poolRegistry.drainInstance({ instanceId, reason: 'rollout' });
      // An engine that stands idle may be what a prompt is computed for at this moment.
      const isIdle = async () => {
        const { running, waiting, loading } = sim.state();
        if (running + waiting + loading > 0) return undefined;
        const metrics = await (await fetch(`${this.adminUrl}/metrics`)).text();
        return metrics.includes(`baton_instance_legs{engine="${instanceId}"`) ? undefined : true;
      };
      await until(isIdle, 20_000);
    }
    this.#outages += 1;
    await sim.crash();
    this.harm.add(sim.state());
    // Whoever is answered from now on may have had either.
    this.#templates.set(sim, template);
    // Engines take their time to start, whoever ended them; nobody takes one back in before it is known again.
    await wait(START_MS);
    await sim.restart(template);
    await until(async () => ((await this.#isKnown(instanceId, generation)) ? true : undefined), 20_000);
    // Killed by the operator, it is not drained, unless by the guard before.
    const { state } = await this.#instance(instanceId);
    if (!isRude || state === InstanceState.DRAINING) await poolRegistry.resumeInstance({ instanceId });
    const isReady = async () => (await this.#instance(instanceId)).state === InstanceState.READY || undefined;
    if ((await until(isReady, 60_000)) === undefined) throw new Error(`${instanceId} does not get ready`);
    this.#lastOutage = performance.now();
    this.#outages -= 1;
  }

  /** Restarts, with what it is, an engine that used another prompt than the one whose KV it had, as an operator does on the alarm. */
  async heal(): Promise<void> {
    const { instances } = await this.remote.poolRegistry.listInstances({ pageSize: 100 });
    for (const { id, state, stateReason } of instances) {
      const sim = this.engines.find((one) => hostOf(one) === id);
      if (sim === undefined || state !== InstanceState.DRAINING || stateReason !== 'guard_breach') continue;
      this.done.breaches += 1;
      await this.#restart(sim, this.#templates.get(sim) ?? 'plain', false);
    }
  }

  async #instance(instanceId: string): Promise<Instance> {
    const { instance } = await this.remote.poolRegistry.getInstance({ instanceId });
    if (instance === undefined) throw new Error(`${instanceId} is not registered`);
    return instance;
  }

  async #isKnown(id: string, before: number): Promise<boolean> {
    const { engine, incarnation } = await this.#instance(id);
    const { version = '', templateFingerprint = '' } = engine ?? {};
    return (incarnation?.generation ?? 0) > before && version !== '' && templateFingerprint !== '';
  }

  async ready(): Promise<void> {
    const isReady = async () => {
      const health = (await (await fetch(`${this.url}/health`)).json()) as { instances: { ready?: number } };
      return health.instances.ready === this.engines.length ? true : undefined;
    };
    if ((await until(isReady, 60_000)) === undefined) throw new Error('the engines do not get ready');
  }

  /** Everything that engines, store and facade still hold; empty when nothing is left. */
  async leftovers(): Promise<readonly string[]> {
    const { entries, claims } = await this.remote.kvCacheStore.getStats({});
    const metrics = await (await fetch(`${this.adminUrl}/metrics`)).text();
    const inFlight = ['baton_requests_in_flight', 'baton_queue_depth', 'baton_instance_legs'];
    const held = metrics
      .split('\n')
      .filter((line) => inFlight.some((name) => line.startsWith(name)) && !line.endsWith(' 0'));
    const busy = this.engines.flatMap((sim) => {
      const { pins, running, waiting, loading, hanging, freeBlocks, rankRequests } = sim.state();
      const used = (BLOCKS - 1) * rankRequests.length - freeBlocks;
      const counts = { pins, running, waiting, loading, hanging, used };
      return Object.entries(counts).flatMap(([name, count]) => (count === 0 ? [] : [`${sim.role} ${name} ${count}`]));
    });
    return [
      ...(Number(entries) === 0 ? [] : [`store entries ${entries}`]),
      ...(Number(claims) === 0 ? [] : [`store claims ${claims}`]),
      ...held,
      ...busy,
    ];
  }

  /** The longest time in which an engine may keep what nobody came for. */
  get keptMs(): number {
    return DECODER_TTL_MS + 30_000;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.#stack.disposeAsync();
  }
}
