// The gate: runs each tool once, prints one line per step, shows what a failed step said, fails when one failed.
// A step that looked at nothing counts as failed: several of these tools are green when a pattern matches no file.
// Arguments pick steps by name; `--jobs N` sets how many run at a time (default 2).
import { spawn } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { delimiter, join, relative } from 'node:path';
import { stripVTControlCharacters } from 'node:util';

const root = join(import.meta.dirname, '..');
const bin = join(root, 'node_modules', '.bin');
const scratch = mkdtempSync(join(tmpdir(), 'baton-check-'));
const image = 'proto/image.binpb';

/** Runs a tool of node_modules/.bin in the repository root; resolves with its exit code and its whole output. */
function run(command, args, env = {}) {
  return new Promise((resolve) => {
    const child = spawn(join(bin, command), args, {
      cwd: root,
      env: {
        ...process.env,
        PATH: `${bin}${delimiter}${process.env.PATH}`,
        NO_COLOR: '1',
        ...env,
      },
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    let output = '';
    child.stdout.on('data', (chunk) => {
      output += chunk;
    });
    child.stderr.on('data', (chunk) => {
      output += chunk;
    });
    child.on('error', (error) => resolve({ ok: false, output: `${output}${error.message}\n` }));
    child.on('close', (code) => resolve({ ok: code === 0, output }));
  });
}

const count = (output, pattern) => Number(pattern.exec(output)?.[1] ?? 0);

function filesUnder(folder, suffix) {
  const path = join(root, folder);
  if (!existsSync(path)) return [];
  return readdirSync(path, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && entry.name.endsWith(suffix))
    .map((entry) => relative(path, join(entry.parentPath, entry.name)))
    .sort();
}

async function biome() {
  const result = await run('biome', ['check', '--error-on-warnings', '--max-diagnostics=100']);
  return { ...result, looked: count(result.output, /Checked (\d+) files?/) };
}

async function oxlint() {
  const result = await run('oxlint', ['--type-aware', '--deny-warnings', '--report-unused-disable-directives']);
  const rules = count(result.output, /with (\d+) rules/);
  return { ...result, looked: rules === 0 ? 0 : count(result.output, /on (\d+) files?/) };
}

async function tsc(project) {
  const result = await run('tsc', ['-p', project, '--listFiles', '--pretty', 'false']);
  const lines = result.output.split('\n');
  const listed = (line) => /^(\/|[A-Za-z]:).*\.(ts|json)$/.test(line);
  const own = lines.filter((line) => listed(line) && !line.includes('/node_modules/') && !line.endsWith('.d.ts'));
  return { ok: result.ok, output: lines.filter((line) => !listed(line)).join('\n'), looked: own.length };
}

async function bufStep(args) {
  const result = await run('buf', args);
  return { ...result, looked: filesUnder('proto', '.proto').length };
}

async function bufBreaking() {
  const looked = filesUnder('proto', '.proto').length;
  if (!existsSync(join(root, image))) {
    return { ok: true, looked, output: '', skipped: `no ${image}: write it with \`npm run proto:image\`` };
  }
  // The baton module alone: as part of an image the vendored protos would be compared too.
  return { ...(await run('buf', ['breaking', 'proto', '--against', image])), looked };
}

async function generated() {
  const result = await run('buf', ['generate', '-o', scratch]);
  const fresh = filesUnder(relative(root, join(scratch, 'gen')), '');
  const committed = filesUnder('gen', '');
  const problems = [
    ...fresh.filter((file) => !committed.includes(file)).map((file) => `missing: gen/${file}`),
    ...committed.filter((file) => !fresh.includes(file)).map((file) => `generated from nothing: gen/${file}`),
    ...fresh
      .filter((file) => committed.includes(file))
      .filter((file) => !readFileSync(join(scratch, 'gen', file)).equals(readFileSync(join(root, 'gen', file))))
      .map((file) => `out of date: gen/${file}`),
  ];
  if (problems.length > 0) problems.push('Run `npm run gen`.');
  return { ok: result.ok && problems.length === 0, output: result.output + problems.join('\n'), looked: fresh.length };
}

async function knip() {
  // Its configuration hints count as errors: a pattern that matches no file is one.
  const result = await run('knip', ['--no-progress', '--treat-config-hints-as-errors']);
  return { ...result, looked: filesUnder('src', '.ts').length };
}

async function layers() {
  const results = join(scratch, 'layers.json');
  const args = ['run', '--project', 'unit', 'test/unit/layers.test.ts'];
  const result = await run('vitest', args, { BATON_TEST_RESULTS: results });
  const passed = existsSync(results) ? JSON.parse(readFileSync(results, 'utf8')).numPassedTests : 0;
  return { ...result, looked: passed, unit: 'tests' };
}

const steps = {
  biome,
  oxlint,
  tsc: () => tsc('tsconfig.json'),
  'tsc-core': () => tsc('tsconfig.core.json'),
  'buf-lint': () => bufStep(['lint']),
  'buf-format': () => bufStep(['format', '--diff', '--exit-code']),
  'buf-breaking': bufBreaking,
  gen: generated,
  knip,
  layers,
};

async function runStep(name) {
  const started = performance.now();
  const result = await steps[name]();
  const seconds = ((performance.now() - started) / 1000).toFixed(1);
  const ok = result.ok && result.looked > 0;
  const mark = !ok ? 'FAILED' : result.skipped === undefined ? 'ok' : 'SKIPPED';
  const detail = result.skipped === undefined ? '' : `  ${result.skipped}`;
  console.log(
    `${mark.padEnd(8)}${name.padEnd(14)}${String(result.looked).padStart(5)} ${result.unit ?? 'files'}  ${seconds} s${detail}`,
  );
  if (!ok) {
    const output = stripVTControlCharacters(result.output).trimEnd();
    if (output !== '') console.log(output.replaceAll(/^/gm, '    '));
    if (result.ok) console.log('    Looked at nothing: this step would pass whatever the sources hold.');
  }
  return mark;
}

function parseArguments(args) {
  const at = args.indexOf('--jobs');
  const jobs = at === -1 ? 2 : Number(args[at + 1]);
  const names = at === -1 ? args : args.toSpliced(at, 2);
  const unknown = names.filter((name) => !Object.hasOwn(steps, name));
  if (unknown.length > 0 || !(jobs >= 1)) {
    console.error(`usage: check [--jobs N] [step...]; steps: ${Object.keys(steps).join(' ')}`);
    process.exit(2);
  }
  return { jobs, names: names.length === 0 ? Object.keys(steps) : names };
}

const { jobs, names } = parseArguments(process.argv.slice(2));
const marks = [];
try {
  const queue = [...names];
  const worker = async () => {
    for (let name = queue.shift(); name !== undefined; name = queue.shift()) marks.push(await runStep(name));
  };
  await Promise.all(Array.from({ length: jobs }, worker));
} finally {
  rmSync(scratch, { recursive: true, force: true });
}

const tally = (mark) => marks.filter((each) => each === mark).length;
const failed = tally('FAILED');
// The shape of a test run's result, so that .ci/run adds a step up like a test.
const summary = {
  success: failed === 0,
  numPassedTests: tally('ok'),
  numFailedTests: failed,
  numPendingTests: tally('SKIPPED'),
};
mkdirSync(join(root, '.test-results'), { recursive: true });
writeFileSync(join(root, '.test-results', 'check.json'), JSON.stringify(summary));
process.exitCode = failed > 0 ? 1 : 0;
