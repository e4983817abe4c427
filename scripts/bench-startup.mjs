// Time from the start of a process to its first good answer on /health, of the executable and of a bare one: five lines
// of Node in an executable of their own. Usage: bench-startup.mjs [executable], default dist/baton; BATON_RUNS starts of
// each (15), in turn. The last line is JSON.
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { get } from 'node:http';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

const baton = resolve(process.argv[2] ?? join(import.meta.dirname, '..', 'dist', 'baton'));
const runs = Number(process.env['BATON_RUNS'] ?? 15);
if (!existsSync(baton)) {
  process.stderr.write(`${baton} does not exist: run npm run build\n`);
  process.exit(1);
}
const scratch = mkdtempSync(join(tmpdir(), 'baton-startup-'));

const BARE = `const { createServer } = require('node:http');
const server = createServer((request, response) => {
  response.end('ok');
});
server.listen(Number(process.argv[2]), '127.0.0.1');`;

function buildBare() {
  const file = (name) => join(scratch, name);
  writeFileSync(file('bare.cjs'), BARE);
  const config = {
    main: file('bare.cjs'),
    output: file('bare'),
    useCodeCache: true,
    disableExperimentalSEAWarning: true,
  };
  writeFileSync(file('bare.json'), JSON.stringify(config));
  execFileSync(process.execPath, ['--build-sea', file('bare.json')], { stdio: 'ignore' });
  return file('bare');
}

async function freePort() {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address();
  server.close();
  return port;
}

function answers(port) {
  return new Promise((done) => {
    const call = get({ host: '127.0.0.1', port, path: '/health', agent: false }, (reply) => {
      reply.resume().on('end', () => done(reply.statusCode === 200));
    });
    call.on('error', () => done(false));
  });
}

/** Milliseconds until the process that `words` start answers. */
async function startUp(words) {
  const port = await freePort();
  const [command, ...args] = words(port);
  const started = performance.now();
  const child = spawn(command, args, { stdio: 'ignore', env: {} });
  const ended = once(child, 'exit');
  let gone = false;
  void ended.then(() => {
    gone = true;
  });
  while (!(await answers(port))) {
    if (gone) throw new Error(`${command} ended before it answered`);
    await new Promise((next) => setTimeout(next, 2));
  }
  const took = performance.now() - started;
  child.kill('SIGKILL');
  await ended;
  return took;
}

const median = (values) => values.toSorted((a, b) => a - b)[values.length >> 1];

const engines = [];
try {
  const bare = buildBare();
  const serve = (port) => [
    baton,
    'serve',
    '--host',
    '127.0.0.1',
    '--port',
    String(port),
    '--rpc-port',
    '0',
    '--admin-port',
    '0',
  ];
  for (const role of ['prefill', 'decode']) {
    const port = await freePort();
    const child = spawn(baton, ['sim', '--role', role, '--port', String(port)], {
      stdio: ['ignore', 'pipe', 'ignore'],
    });
    engines.push({ child, words: [`--${role}`, `http://127.0.0.1:${port}`] });
    await once(child.stdout, 'data');
  }
  const cases = {
    bare: (port) => [bare, String(port)],
    serve: (port) => [...serve(port), ...engines.flatMap(({ words }) => words)],
    'serve --sim': (port) => [...serve(port), '--sim'],
  };
  const took = Object.fromEntries(Object.keys(cases).map((name) => [name, []]));
  for (let run = 0; run <= runs; run += 1) {
    for (const [name, words] of Object.entries(cases)) {
      const ms = await startUp(words);
      // The first of each reads its file from the disk.
      if (run > 0) took[name].push(ms);
    }
  }
  const medians = Object.fromEntries(Object.entries(took).map(([name, values]) => [name, median(values)]));
  for (const [name, ms] of Object.entries(medians))
    process.stdout.write(
      `${name.padEnd(12)} ${ms.toFixed(0).padStart(5)} ms  ${(ms / medians.bare).toFixed(2)} x bare\n`,
    );
  process.stdout.write(`${JSON.stringify(medians)}\n`);
} finally {
  for (const { child } of engines) child.kill('SIGKILL');
  rmSync(scratch, { recursive: true, force: true });
}
