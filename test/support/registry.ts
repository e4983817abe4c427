import type { InstanceSpec } from '../../src/core/instance-spec.ts';
import { stateWord } from '../../src/core/instance-words.ts';
import type { Probe, ProbePart, ProbeResult } from '../../src/engine/probe.ts';
import { type Logger, SILENT_LOGGER } from '../../src/obs/log.ts';
import type { Clock } from '../../src/services/clock.ts';
import { PoolRegistryService } from '../../src/services/registry/pool-registry.ts';

/** Time that passes when the test says so. */
export class FakeClock implements Clock {
  #now = 0;
  #timers: { at: number; run: () => void }[] = [];
  now = () => this.#now;
  get pending() {
    return this.#timers.length;
  }
  setTimer(run: () => void, delayMs: number) {
    const timer = { at: this.#now + delayMs, run };
    this.#timers.push(timer);
    return () => {
      this.#timers = this.#timers.filter((other) => other !== timer);
    };
  }
  /** Lets time pass, firing timers in order and letting what they start settle. */
  async pass(ms: number) {
    const end = this.#now + ms;
    await settle();
    for (;;) {
      const next = this.#timers.filter(({ at }) => at <= end).sort((a, b) => a.at - b.at)[0];
      if (next === undefined) break;
      this.#timers = this.#timers.filter((other) => other !== next);
      this.#now = Math.max(this.#now, next.at);
      next.run();
      await settle();
    }
    this.#now = end;
  }
}

/** Lets what was started go as far as it gets. */
export const settle = () => new Promise<void>((resolve) => setImmediate(resolve));

/** An instance at the address that is its id. */
export const spec = (id: string, role: InstanceSpec['role'] = 'decode'): InstanceSpec => ({
  id,
  url: `http://${id}`,
  role,
  connector: 'nixl',
  headers: {},
  labels: { zone: id },
  kvLeaseMs: 30_000,
  decoderTtlMs: 480_000,
  bidirectional: 'auto',
  loadFailurePolicy: 'fail',
});

export const CARD = { id: 'm', root: 'm', parent: '', maxModelLen: 4096, rawJson: '{"id":"m"}' };
/** What an engine in good health answers. */
export const good = (
  metrics: ProbeResult['metrics'] = {
    processStartSeconds: 100,
    blockSize: 16,
    running: 1,
    waiting: 3,
    waitingDeferred: 2,
  },
): ProbeResult => ({
  health: { kind: 'ok', detail: '' },
  models: [CARD],
  version: '0.33.0',
  metrics,
  kind: 'vllm',
});
export const bad = (kind: 'refused' | 'timeout' | 'unhealthy' | 'reset' | 'no_engine'): ProbeResult => ({
  health: { kind, detail: '' },
});

interface Call {
  readonly at: number;
  readonly parts: readonly ProbePart[];
}

/** A registry whose probes are answered by `world.reply`. */
export function setUp(
  ids: readonly string[] = ['a:1'],
  options: { intervalMs?: number; dampingMs?: number; historyLimit?: number; start?: boolean; log?: Logger } = {},
) {
  const clock = new FakeClock();
  const calls: Call[] = [];
  const world = { reply: async (_id: string): Promise<ProbeResult> => good() };
  const probe: Probe = async (target, parts) => {
    calls.push({ at: clock.now(), parts: [...parts] });
    const result = await world.reply(target.url.slice('http://'.length));
    const { health, kind } = result;
    return {
      health,
      ...(kind === undefined ? {} : { kind }),
      ...(parts.has('models') && result.models !== undefined ? { models: result.models } : {}),
      ...(parts.has('version') && result.version !== undefined ? { version: result.version } : {}),
      ...(parts.has('metrics') && result.metrics !== undefined ? { metrics: result.metrics } : {}),
    };
  };
  const health = {
    intervalMs: options.intervalMs ?? 5000,
    timeoutMs: 2000,
    failures: 3,
    dampingMs: options.dampingMs ?? 0,
  };
  const registry = new PoolRegistryService({
    health,
    log: options.log ?? SILENT_LOGGER,
    connectors: ['nixl', 'lmcache'],
    probe,
    clock,
    random: () => 0.5,
    epoch: 'e1',
    ...(options.historyLimit === undefined ? {} : { historyLimit: options.historyLimit }),
  });
  registry.applySource(
    'static',
    ids.map((id) => spec(id, id.startsWith('p') ? 'prefill' : id.startsWith('b') ? 'both' : 'decode')),
  );
  if (options.start !== false) registry.start();
  const only = () => {
    const [instance] = registry.snapshot();
    if (instance === undefined) throw new Error('no instance');
    return instance;
  };
  const state = () => `${stateWord(only().state)} ${only().stateReason}`;
  const generation = () => only().incarnation?.generation;
  return { clock, calls, world, registry, health, only, state, generation };
}
