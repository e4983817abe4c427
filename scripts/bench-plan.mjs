// Measures the router: processor time and allocated bytes of a plan with its two reports, for each policy at 10, 100 and
// 1,000 instances of each role, while 256 plans are open. Run with --expose-gc and a young generation that holds a whole
// batch, see package.json. Argument: plans per measurement (default 20000).
import { create } from '@bufbuild/protobuf';
import { EngineInfoSchema, LoadSampleSchema, ModelCardSchema } from '../gen/baton/v1/instance_pb.ts';
import {
  Leg,
  LegEnding,
  LegReportSchema,
  PlanRouteRequestSchema,
  ReportOutcomeRequestSchema,
} from '../gen/baton/v1/router_pb.ts';
import { fileSchema } from '../src/config/schema.ts';
import { loneRouter } from '../test/support/lone-router.ts';
import { decodeOf, Pools, prefillOf } from '../test/support/plan-instances.ts';

const plans = Number(process.argv[2] ?? 20_000);
const OPEN = 256;
const BATCH = 1000;
const SIZES = [10, 100, 1000];
const NAMES = [
  'round_robin',
  'random',
  'power_of_two',
  'least_loaded',
  'weighted',
  'consistent_hash',
  'sticky_least_loaded',
  'cache_aware',
];
const { consistent_hash, cache_aware, sticky_least_loaded } = fileSchema.parse({}).policies;
const settings = {
  consistentHash: { loadFactor: consistent_hash.load_factor },
  cacheAware: {
    cacheThreshold: cache_aware.cache_threshold,
    balanceAbsThreshold: cache_aware.balance_abs_threshold,
    balanceRelThreshold: cache_aware.balance_rel_threshold,
    maxBytes: cache_aware.max_bytes,
    maxAgeMs: cache_aware.max_age,
  },
  stickyLeastLoaded: { maxLegs: sticky_least_loaded.max_legs, sessions: sticky_least_loaded.sessions },
};
const { signal } = new AbortController();

const ENGINE = { kind: 'vllm', version: '0.33.0', blockSize: 16, numGpuBlocks: 10_000, templateFingerprint: 'f' };
const CHANGES = {
  engine: create(EngineInfoSchema, ENGINE),
  models: [create(ModelCardSchema, { id: 'm', root: 'weights' })],
  load: create(LoadSampleSchema, { running: 3, kvCacheUsage: 0.5 }),
};
const idOf = (net, index) => `10.${net}.${index >> 8}.${index & 255}:8000`;

function routerOf(name, size) {
  const of = (make, net) => Array.from({ length: size }, (_, index) => make(idOf(net, index), CHANGES));
  const pools = new Pools([...of(prefillOf, 1), ...of(decodeOf, 2)]);
  const router = loneRouter(pools, name, settings);
  const open = [];
  let count = 0;
  const end = async ({ planId, prefill }) => {
    const legs = [create(LegReportSchema, { leg: Leg.PREFILL, instanceId: prefill.instanceId, ending: LegEnding.OK })];
    await router.reportOutcome(create(ReportOutcomeRequestSchema, { planId, legs }));
    await router.reportOutcome(create(ReportOutcomeRequestSchema, { planId, final: true }));
  };
  return {
    async plan() {
      count += 1;
      const conversation = count % 5000;
      const prefix = Array.from({ length: 8 }, (_, i) => ({
        hash: BigInt(conversation * 64 + i),
        bytes: 500 * (i + 1),
      }));
      const facts = { requestId: 'r', tenant: 't', model: 'm', conversationId: `c${conversation}`, prefix };
      const { result } = await router.planRoute(create(PlanRouteRequestSchema, { facts }), { signal });
      open.push(result.value);
      if (open.length > OPEN) await end(open.shift());
    },
    /** What a probe does: one instance has another load. */
    probe() {
      const instances = pools.snapshot();
      const index = count % instances.length;
      const { load } = instances[index];
      const changed = { ...instances[index], load: { ...load, running: load.running + 1 } };
      pools.set(instances.with(index, changed));
    },
  };
}

/** @returns microseconds of processor time and bytes a step. */
async function measure(step) {
  for (let i = 0; i < 5000; i += 1) await step();
  globalThis.gc();
  const begin = process.cpuUsage();
  for (let i = 0; i < plans; i += 1) await step();
  const { user, system } = process.cpuUsage(begin);
  globalThis.gc();
  const before = process.memoryUsage().heapUsed;
  for (let i = 0; i < BATCH; i += 1) await step();
  const bytes = (process.memoryUsage().heapUsed - before) / BATCH;
  return { micros: (user + system) / plans, bytes };
}

const row = (name, cells) => console.log(`| ${name.padEnd(30)} | ${cells.join(' | ')} |`);
const cell = ({ micros, bytes }) => `${micros.toFixed(1)} µs, ${(bytes / 1024).toFixed(1)} KiB`.padStart(18);
row(
  'instances of each role',
  SIZES.map((size) => String(size).padStart(18)),
);
row(
  '-'.repeat(30),
  SIZES.map(() => `${'-'.repeat(17)}:`),
);
for (const name of NAMES) {
  const cells = [];
  for (const size of SIZES) {
    const { plan } = routerOf(name, size);
    cells.push(cell(await measure(plan)));
  }
  row(`\`${name}\``, cells);
}
const cells = [];
for (const size of SIZES) {
  const { plan, probe } = routerOf('power_of_two', size);
  cells.push(
    cell(
      await measure(() => {
        probe();
        return plan();
      }),
    ),
  );
}
row('`power_of_two`, a probe a plan', cells);
