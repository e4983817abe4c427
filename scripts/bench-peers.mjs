// What a request costs beside other routers: the works of the performance kit (BATON_SHARED/perf, default ../shared), each
// against all in turn, so that ratios to vllm-router of one run can be kept. Rewrites the tables of
// docs/performance/peers.md. baton runs from dist, which is built first, with metrics and access log on: with its defaults,
// and as `baton-off` without reuse. Linux with Go, bash, curl and Python.
// Environment: REPS (3), T (4s), TD (5s) and WORKS of the kit; BENCH_PEERS, a list of what is run beside baton (vllm-router,
// and of nginx, sglang-router, litellm and seed those whose programs are named); VLLM_ROUTER, NGINX, SGLANG_ROUTER, LITELLM,
// SEED_PY with SEED_SCRIPT: their programs. A vllm-router that is not named is installed into a folder of its own in the
// temporary one, and found there by the next run. BENCH_DIST: compiled code to run instead of what is built.
import { execFileSync, spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { judge, measures, rowsOf } from './peer-targets.mjs';
import { machine } from './store-process.mjs';

const root = join(import.meta.dirname, '..');
const page = join(root, 'docs', 'performance', 'peers.md');
const kit = join(resolve(root, process.env.BATON_SHARED ?? '../shared'), 'perf');
const VLLM_ROUTER = '0.1.17';
const { BENCH_PEERS, BENCH_DIST, WORKS = 'F A B Bp C D E G', REPS = '3', T = '4s', TD = '5s' } = process.env;

function isThere(program) {
  return spawnSync('sh', ['-c', `command -v "${program}"`], { stdio: 'ignore' }).status === 0;
}

function skip(why) {
  console.warn(`SKIPPED: bench:peers: ${why}`);
  process.exit(process.env.CI ? 1 : 0);
}

function installedRouter() {
  const folder = join(tmpdir(), `baton-peers-vllm-router-${VLLM_ROUTER}`);
  const program = join(folder, 'bin', 'vllm-router');
  if (existsSync(program)) return program;
  if (!isThere('python3')) return undefined;
  console.error(`installing vllm-router ${VLLM_ROUTER} into ${folder}`);
  execFileSync('python3', ['-m', 'venv', folder], { stdio: 'inherit' });
  const { status } = spawnSync(join(folder, 'bin', 'pip'), ['install', '-q', `vllm-router==${VLLM_ROUTER}`], {
    stdio: 'inherit',
  });
  return status === 0 ? program : undefined;
}

/** The program does not tell its version; the Python that it was installed with does. */
function routerVersion(program) {
  const ask = "import importlib.metadata as m; print(m.version('vllm-router'))";
  const { stdout } = spawnSync(join(dirname(program), 'python'), ['-c', ask], { encoding: 'utf8' });
  return stdout?.trim() || 'of a version that is not known';
}

if (!existsSync(join(kit, 'run.sh'))) skip(`no performance kit in ${kit}; name its parent folder with BATON_SHARED`);
for (const program of ['go', 'bash', 'curl']) if (!isThere(program)) skip(`${program} is missing`);
const router = process.env.VLLM_ROUTER ?? installedRouter();
if (router === undefined || !isThere(router)) skip('no vllm-router: name its program with VLLM_ROUTER');

const named = {
  nginx: process.env.NGINX ?? (isThere('nginx') ? 'nginx' : undefined),
  'sglang-router': process.env.SGLANG_ROUTER,
  litellm: process.env.LITELLM,
  seed: process.env.SEED_SCRIPT,
};
const others = Object.keys(named).filter((name) => named[name] !== undefined);
const peers = BENCH_PEERS === undefined ? ['vllm-router', ...others] : BENCH_PEERS.split(/[\s,]+/).filter(Boolean);
if (!peers.includes('vllm-router')) skip('BENCH_PEERS has no vllm-router, which ratios are to');

if (BENCH_DIST === undefined)
  execFileSync(process.execPath, [join(root, 'scripts', 'build.mjs'), '--package'], { stdio: 'inherit' });
const dist = resolve(BENCH_DIST ?? join(root, 'dist'));
const serve =
  `${process.execPath} ${join(dist, 'src', 'bin.js')} serve --host 127.0.0.1 --port $PORT --rpc-port off --admin-port $MPORT ` +
  '--prefill http://127.0.0.1:$P1 --prefill http://127.0.0.1:$P2 --decode http://127.0.0.1:$D1 --decode http://127.0.0.1:$D2';
const out = mkdtempSync(join(tmpdir(), 'baton-bench-peers-'));
const targets = ['direct', ...peers, `baton!${serve}`, `baton-off!${serve} --reuse-guard off --unsafe-reuse`];
const { status } = spawnSync('bash', [join(kit, 'run.sh'), ...targets], {
  stdio: ['ignore', 'ignore', 'inherit'],
  env: { ...process.env, OUT: out, REPS, T, TD, WORKS, REF: 'vllm-router', VLLM_ROUTER: router },
});
const saved = join(out, 'results.jsonl');
if (status !== 0 || !existsSync(saved)) throw new Error(`the run failed with ${status}; its logs are in ${out}`);
const results = readFileSync(saved, 'utf8')
  .trim()
  .split('\n')
  .map((line) => JSON.parse(line));
const tables = readFileSync(join(out, 'tables.md'), 'utf8').trim();
rmSync(out, { recursive: true });

const { commit, version } = JSON.parse(readFileSync(join(dist, 'origin.json'), 'utf8'));
const busy = measures.othersCores(results);
const text = [
  `\`npm run bench:peers\` on ${new Date().toISOString().slice(0, 10)}: ${machine}; baton ${version}` +
    `${commit ? ` (${commit.slice(0, 12)})` : ''}, vllm-router ${routerVersion(router)}. ${REPS} interleaved ` +
    `repetitions, ${T} for each work. Other processes used ${busy.least} to ${busy.most} cores meanwhile, ` +
    `${busy.median} in the median.`,
  '',
  '| work | target | value | vllm-router | ratio | must | stretch | |',
  '|---|---|---:|---:|---:|---:|---:|---|',
  ...rowsOf(results).map(judge),
  '',
  'A ratio is the median over the repetitions of the value beside that of vllm-router in the same repetition.',
  '',
  tables.replaceAll(/^### /gm, '#### '),
].join('\n');
const [START, END] = ['<!-- bench:peers -->', '<!-- /bench:peers -->'];
const before = existsSync(page) ? readFileSync(page, 'utf8') : `# Beside other routers\n\n${START}\n${END}\n`;
const [head, tail] = [before.split(START)[0], before.split(END)[1] ?? '\n'];
writeFileSync(page, `${head}${START}\n${text}\n${END}${tail}`);
console.log(text);
