import { readdirSync, readFileSync } from 'node:fs';
import { dirname, join, normalize, relative } from 'node:path';
import { describe, expect, it } from 'vitest';
import { importsOf, tokensOf } from '../support/source-tokens.ts';

/** What the files of one area may import, besides files of their own area. */
interface Row {
  /** Areas, and single files written as `area/file`. */
  readonly areas?: readonly string[];
  /** Areas of which only types may be imported. */
  readonly types?: readonly string[];
  /** Package names; `node:` stands for all of Node, `node:crypto` for one module of it. */
  readonly packages?: readonly string[];
  /** Packages of which only types may be imported. */
  readonly packageTypes?: readonly string[];
}

/** Areas that read nothing but its arguments: no clock, chance, I/O or Node. */
const PURE = ['core', 'policies', 'connectors'];
/** Lists of what can be chosen by name: roles.ts reads them, and a file whose row of the table names them. */
const REGISTRIES = ['policies/index', 'connectors/index', 'stores/index', 'discovery/index'];
const PROTOBUF = '@bufbuild/protobuf';
const CONNECT = ['@connectrpc/connect', '@connectrpc/connect-node'];
const EVERYTHING = '*';

/** The import table. A key is a folder of src, a file of src without its ending, or `folder/file` for one file. */
const TABLE: Readonly<Record<string, Row>> = {
  gen: { packages: [PROTOBUF] },
  types: {},
  core: { areas: ['gen'], packages: [PROTOBUF] },
  policies: { areas: ['core', 'gen'], packages: [PROTOBUF] },
  connectors: { areas: ['core', 'gen'], packages: [PROTOBUF] },
  call: { areas: ['core', 'gen'], types: ['obs'], packageTypes: ['@connectrpc/connect'] },
  config: { areas: ['core', 'gen'], packages: ['zod', 'yaml', 'node:util'] },
  'config/load': { areas: ['core', 'gen'], packages: ['zod', 'yaml', 'node:'] },
  // Finds package.json, from src and from dist/src, and asks git.
  'config/version': { packages: ['node:'] },
  obs: { areas: ['core', 'gen'], packages: ['pino', 'prom-client', 'node:'] },
  // The one place that loads OpenTelemetry, and is loaded only where traces are wanted.
  tracing: {
    areas: ['core', 'obs'],
    packages: [
      '@opentelemetry/api',
      '@opentelemetry/core',
      '@opentelemetry/exporter-trace-otlp-proto',
      '@opentelemetry/resources',
      '@opentelemetry/sdk-trace',
      'node:',
    ],
  },
  stores: { areas: ['core', 'gen', 'call'], packages: [PROTOBUF, 'node:'] },
  // The places that load a Redis client, and are loaded only with that backend.
  'stores/valkey/link': { areas: ['core', 'gen'], packages: ['iovalkey', 'node:'] },
  'stores/valkey/script-call': { packages: ['iovalkey', 'node:'] },
  engine: { areas: ['core', 'gen', 'call', 'obs'], packages: [PROTOBUF, 'undici', 'node:'] },
  // The one place that loads ZMQ, and is loaded only with a connector that needs it.
  'engine/notices': { packages: ['zeromq', '@msgpack/msgpack'] },
  services: {
    areas: [
      'core',
      'gen',
      'call',
      'engine',
      'obs',
      'policies/policy',
      'connectors/connector',
      'stores/store',
      'stores/aging-map',
      'stores/refusals',
      // What an engine's URL may be is said in one place.
      'config/instance-url',
    ],
    types: ['config'],
    // No sockets, files or processes of their own: those are reached through engine and stores.
    packages: [PROTOBUF, 'node:crypto', 'node:perf_hooks', 'node:timers/promises'],
    packageTypes: ['@connectrpc/connect', 'node:'],
  },
  // Where instances come from; what they become is the registry's.
  discovery: { areas: ['config', 'core', 'obs', 'services/pause'], packages: ['node:', 'zod'] },
  // The one place that loads a client of Kubernetes, and is loaded only with that source.
  'discovery/kubernetes/api': { areas: ['config'], packages: ['@kubernetes/client-node'] },
  rpc: {
    areas: ['services', 'core', 'gen', 'call', 'obs'],
    types: ['config'],
    packages: [PROTOBUF, ...CONNECT, 'node:'],
  },
  // The package entry for other people's routers.
  client: {
    areas: ['rpc', 'services/sha256', 'core', 'gen'],
    packages: [PROTOBUF, 'node:crypto'],
    packageTypes: CONNECT,
  },
  // Tokens of clients; the one place that loads jose.
  auth: { areas: ['core', 'obs', 'services/credential'], packages: ['jose', 'node:'] },
  http: {
    areas: ['services', 'core', 'gen', 'call', 'obs', 'config/instance-url'],
    types: ['config'],
    packages: [PROTOBUF, 'fastify', 'node:'],
    packageTypes: ['@connectrpc/connect'],
  },
  sim: { areas: ['core'], packages: ['node:', '@whatwg-node/disposablestack'] },
  'sim/notice-socket': { packages: ['zeromq', '@msgpack/msgpack'] },
  roles: { areas: [EVERYTHING], packages: [EVERYTHING] },
  // Measures endpoints, with a client of its own.
  bench: { areas: ['config', 'core'], packages: ['undici', 'node:'] },
  launch: { areas: ['bench', 'core', 'gen', 'config', 'obs'], packages: ['node:'] },
  cli: {
    areas: ['roles', 'bench', 'config', 'launch', 'sim', 'core', 'obs'],
    packages: ['commander', 'yaml', 'node:'],
  },
  // Help for other programs: what is known of the commands, written down.
  'cli/describe': { packages: ['commander'] },
  'cli/explain': {
    areas: ['roles', 'gen', 'core', 'config/unread', 'services/plan-message'],
    types: ['config', 'obs'],
    packages: [PROTOBUF, 'node:'],
  },
  // Tells an unknown name in the configuration from a known one without loading the servers behind roles.ts.
  'cli/run': {
    areas: ['config', 'sim', 'core', 'obs', 'known'],
    types: ['roles', 'launch'],
    packages: ['node:'],
  },
  // Talks with a running registry.
  'cli/pool-command': {
    areas: ['config', 'core', 'gen', 'rpc'],
    packages: [PROTOBUF, '@connectrpc/connect', 'node:'],
  },
  // The package entry that starts baton in somebody else's process.
  serve: { areas: ['config', 'roles', 'obs', 'known'] },
  // The package entry with the contracts.
  proto: { areas: ['gen'] },
  // The names that settings choose from; loads no server.
  known: { areas: ['policies/index', 'connectors/index', 'stores/index'], types: ['config'] },
  // What only the executable of one file has.
  executable: { packages: ['node:'] },
  bin: { areas: ['cli', 'roles', 'config/version', 'executable'], types: ['config', 'obs'], packages: ['node:'] },
};

interface SourceFile {
  /** Path from the repository root, with forward slashes. */
  readonly path: string;
  readonly text: string;
}

/** `src/http/routes/models.ts` is in area `http`, its key is `http/routes/models`. */
function keyOf(path: string): string {
  return path
    .replace(/^gen\/.*/, 'gen')
    .replace(/^src\//, '')
    .replace(/(\.d)?\.ts$/, '');
}

function areaOf(key: string): string {
  return key.split('/')[0] ?? key;
}

function packageOf(specifier: string): string {
  if (specifier.startsWith('node:')) return 'node:';
  return specifier
    .split('/')
    .slice(0, specifier.startsWith('@') ? 2 : 1)
    .join('/');
}

function violationsOf(file: SourceFile): readonly string[] {
  const key = keyOf(file.path);
  const area = areaOf(key);
  const row = TABLE[key] ?? TABLE[area];
  if (row === undefined) return [`${file.path}: no row of the import table covers it`];
  const tokens = tokensOf(file.text);
  const problems: string[] = [];
  const complain = (line: number, what: string): void => {
    problems.push(`${file.path}:${line}: ${what}`);
  };
  const allows = (list: readonly string[] | undefined, ...names: readonly string[]): boolean =>
    list !== undefined && (list.includes(EVERYTHING) || names.some((name) => list.includes(name)));

  for (const { specifier, typeOnly, line } of importsOf(tokens)) {
    if (!specifier.startsWith('.')) {
      const names = [packageOf(specifier), specifier];
      if (specifier === '?') complain(line, 'imports a computed path');
      else if (allows(row.packages, ...names) || (typeOnly && allows(row.packageTypes, ...names))) continue;
      else complain(line, `${area} may not import ${specifier}`);
      continue;
    }
    const targetPath = normalize(join(dirname(file.path), specifier)).replaceAll('\\', '/');
    const target = keyOf(targetPath);
    const targetArea = areaOf(target);
    if (!/^(src|gen)\//.test(targetPath)) {
      complain(line, `${area} may not import ${targetPath}`);
    } else if (REGISTRIES.includes(target) && !allows(row.areas, target)) {
      complain(line, `only roles.ts imports ${targetPath}`);
    } else if (targetArea !== area && !allows(row.areas, target, targetArea)) {
      if (!(typeOnly && allows(row.types, target, targetArea))) complain(line, `${area} may not import ${targetPath}`);
    }
  }

  if (PURE.includes(area)) {
    for (const [index, token] of tokens.entries()) {
      if (token.kind !== 'word' || tokens[index - 1]?.text === '.') continue;
      const [dot, member] = [tokens[index + 1], tokens[index + 2]];
      const before = tokens[index - 1]?.text;
      if (token.text === 'Date' && (before === 'new' || dot?.text === '(')) complain(token.line, 'reads the clock');
      if (token.text === 'Date' && dot?.text === '.' && member?.text === 'now') complain(token.line, 'reads the clock');
      if (token.text === 'Math' && dot?.text === '.' && member?.text === 'random') complain(token.line, 'draws chance');
      if (token.text === 'Buffer' || token.text === 'process') complain(token.line, `uses Node's ${token.text}`);
      if (token.text === 'globalThis') complain(token.line, 'reaches around these rules with globalThis');
    }
  }
  return problems;
}

const root = join(import.meta.dirname, '..', '..');

function sources(folder: string): readonly SourceFile[] {
  return readdirSync(join(root, folder), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && entry.name.endsWith('.ts'))
    .map((entry) => join(entry.parentPath, entry.name))
    .map((path) => ({ path: relative(root, path).replaceAll('\\', '/'), text: readFileSync(path, 'utf8') }));
}

describe('import table', () => {
  const files = [...sources('src'), ...sources('gen')];

  it('finds sources in every folder of the table that holds some', () => {
    const areas = new Set(files.map((file) => areaOf(keyOf(file.path))));
    expect([...areas]).toEqual(expect.arrayContaining(['core', 'policies', 'connectors', 'gen']));
  });

  it('reads imports out of nearly every file', () => {
    // A scanner that goes blind would make the table hold for free.
    const silent = sources('src').filter(
      (file) => /^import /m.test(file.text) && importsOf(tokensOf(file.text)).length === 0,
    );
    expect(silent.map((file) => file.path)).toEqual([]);
    expect(files.flatMap((file) => importsOf(tokensOf(file.text))).length).toBeGreaterThan(20);
  });

  it('holds', () => {
    expect(files.flatMap(violationsOf)).toEqual([]);
  });
});

describe('import table: self-test', () => {
  const check = (path: string, text: string): readonly string[] => violationsOf({ path, text });

  it.each([
    ['src/core/a.ts', "import { x } from '../engine/client.ts';"],
    ['src/core/a.ts', "import type { x } from '../services/router.ts';"],
    ['src/core/a.ts', "import { readFileSync } from 'node:fs';"],
    ['src/core/a.ts', "import fs from 'fs';"],
    ['src/core/a.ts', "import {\n  a, // from './b.ts'\n  b,\n} from 'undici';"],
    ['src/core/a.ts', "export { x } from '../obs/log.ts';"],
    ['src/core/a.ts', "export * from '../obs/log.ts';"],
    ['src/core/a.ts', "import 'pino';"],
    ['src/core/a.ts', "const x = await import('node:os');"],
    ['src/core/a.ts', 'const x = await import(name);'],
    ['src/core/a.ts', "import { x } from '../../test/support/clock.ts';"],
    ['src/policies/a.ts', "import { x } from '../connectors/connector.ts';"],
    ['src/policies/a.ts', "import { x } from './index.ts';"],
    ['src/services/router.ts', "import { x } from '../policies/index.ts';"],
    ['src/services/router.ts', "import { x } from '../policies/round-robin.ts';"],
    ['src/services/router.ts', "import { createClient } from '@connectrpc/connect';"],
    ['src/services/router.ts', "import { x } from '../config/load.ts';"],
    ['src/services/router.ts', "import { connect } from 'node:net';"],
    ['src/http/routes/chat.ts', "import { x } from '../../rpc/routes.ts';"],
    ['src/rpc/routes.ts', "import { x } from '../http/app.ts';"],
    ['src/rpc/routes.ts', "import { x } from '../config/schema.ts';"],
    ['src/config/schema.ts', "import { readFileSync } from 'node:fs';"],
    ['src/sim/engine.ts', "import { x } from '../engine/client.ts';"],
    ['src/cli/main.ts', "import { x } from '../services/router.ts';"],
    ['src/cli/help.ts', "import { x } from '../policies/index.ts';"],
    ['src/cli/run.ts', "import { x } from '../roles.ts';"],
    ['src/cli/main.ts', "import manifest from '../../package.json' with { type: 'json' };"],
    ['src/bin.ts', "import { x } from './config/schema.ts';"],
    ['src/core/a.ts', 'const now = Date.now();'],
    ['src/core/a.ts', 'const now = `${Date.now()}`;'],
    ['src/core/a.ts', "const rule = /['`]/; const now = new Date();"],
    ['src/core/a.ts', 'const now = Date();'],
    ['src/connectors/a.ts', 'const p = Math\n  .random();'],
    ['src/policies/a.ts', "const b = Buffer.from('');"],
    ['src/core/a.ts', 'const p = globalThis.process;'],
  ])('rejects in %s: %s', (path, text) => {
    expect(check(path, text)).toHaveLength(1);
  });

  it.each([
    ['src/core/a.ts', "import { x } from './b.ts';\nimport { X } from '../../gen/baton/v1/router_pb.ts';"],
    ['src/core/a.ts', "// Date.now() and import 'pino'\n/* new Date() */ const text = 'Date.now()';"],
    ['src/core/a.ts', "const text = `Math.random() ${'}'} // import 'x'`;"],
    ['src/core/a.ts', "const half = (a + b) / 2; const text = 'x'; const quarter = half / 2;"],
    ['src/core/a.ts', 'const { now } = clock; clock.Date.now(); export const from = 1;'],
    ['src/services/router.ts', "import type { Client } from '@connectrpc/connect';"],
    ['src/services/router.ts', "import { x } from '../policies/policy.ts';"],
    ['src/services/router.ts', "import { randomUUID } from 'node:crypto';"],
    ['src/rpc/routes.ts', "import type { Config } from '../config/schema.ts';"],
    ['src/config/load.ts', "import { readFileSync } from 'node:fs';"],
    ['src/roles.ts', "import { policies } from './policies/index.ts';\nimport { x } from './http/app.ts';"],
    ['src/bin.ts', "const { startBaton } = await import('./roles.ts');"],
    ['src/engine/a.ts', 'const now = Date.now();'],
  ])('accepts in %s: %s', (path, text) => {
    expect(check(path, text)).toEqual([]);
  });

  it.each(['src/helpers/a.ts', 'src/util.ts'])('rejects %s, which no row covers', (path) => {
    expect(check(path, 'export const x = 1;')).toEqual([`${path}: no row of the import table covers it`]);
  });
});
