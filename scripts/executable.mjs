// Builds the executable: Node with baton inside, in one file. Usage: executable.mjs [folder], default dist.
// Beside it lies THIRD_PARTY_LICENSES, which `baton licenses` prints.
import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { crc32 } from 'node:zlib';
import { build } from 'esbuild';
import { licenseText } from './licenses.mjs';
import { readOrigin } from './origin.mjs';
import { nodeNames, splitProgram } from './split-program.mjs';

const root = join(import.meta.dirname, '..');
const folder = resolve(process.argv[2] ?? join(root, 'dist'));
const scratch = mkdtempSync(join(tmpdir(), 'baton-executable-'));
const origin = readOrigin();
const file = (name) => join(scratch, name);

/** The library of zeromq that this Node loads; the package has one for each system. */
function zeromqLibrary() {
  const require = createRequire(import.meta.url);
  require('zeromq');
  const found = Object.keys(require.cache).filter((path) => path.endsWith('.node'));
  if (found.length !== 1) throw new Error(`expected zeromq to load one library, found ${found.join(', ')}`);
  return found[0];
}

const PROGRAM = 'src/bin.ts';
/**
 * The scripts of the program, in the order in which a start reads them, each with the sources that ask for it: what is
 * needed until health is answered, then what src/roles.ts loads in portions, and last what only some commands and settings
 * need.
 */
const SCRIPTS = {
  program: [PROGRAM, 'src/cli/run.ts', 'src/config/version.ts', 'src/roles.ts'],
  messages: ['gen/baton/v1/pool_registry_pb.ts', 'src/rpc/direct-client.ts'],
  store: ['src/roles/store.ts'],
  router: ['src/roles/router.ts', 'src/engine/client.ts'],
  roles: ['src/roles/facade.ts', 'src/roles/rpc-port.ts', 'src/roles/start-roles.ts'],
  sometimes: [],
};

const own = (path) => new RegExp(`/${path.replaceAll(/[/.]/g, '[/.]')}$`);

/** undici loads all that it has with its index; baton needs three of its classes, and gets no other name here. */
const UNDICI = `
import Dispatcher from './lib/dispatcher/dispatcher.js';
import api from './lib/api/index.js';
Object.assign(Dispatcher.prototype, api);
export { default as Agent } from './lib/dispatcher/agent.js';
export { default as Client } from './lib/dispatcher/client.js';
export { default as Pool } from './lib/dispatcher/pool.js';`;

/** What needs the Kubernetes client, which is large and seldom used: it is a part of its own, read when it is needed. */
const KUBERNETES = 'src/discovery/kubernetes/api.ts';

/** Modules of Node that packages open when they are loaded, and use late or never: each is opened when it is first used. */
const nodeLater = {
  name: 'node-later',
  setup: ({ onResolve, onLoad }) => {
    onResolve({ filter: /^(node:)?(https|http2|child_process)$/ }, ({ path, importer }) =>
      /node_modules\/(fastify|prom-client|commander)\//.test(importer) ? { path, namespace: 'node-later' } : undefined,
    );
    onLoad({ filter: /.*/, namespace: 'node-later' }, ({ path }) => ({
      contents: `module.exports = new Proxy({}, { get: (_, name) => process.getBuiltinModule('${path}')[name] });`,
    }));
  },
};

/** Packages that others load with themselves, and use for few things of their own: each is loaded when it is first used. */
const packageLater = {
  name: 'package-later',
  setup: ({ onResolve, onLoad, resolve }) => {
    onResolve({ filter: /^semver$/ }, async ({ path, importer, kind, resolveDir, pluginData }) => {
      if (pluginData === 'own' || !/node_modules\/fastify\//.test(importer)) return undefined;
      const { path: real } = await resolve(path, { importer, kind, resolveDir, pluginData: 'own' });
      return { path: real, namespace: 'package-later' };
    });
    onLoad({ filter: /.*/, namespace: 'package-later' }, ({ path }) => ({
      contents: `module.exports = new Proxy({}, { get: (_, name) => require(${JSON.stringify(path)})[name] });`,
      resolveDir: root,
    }));
  },
};

/** Puts in the place of modules that read files beside themselves what the executable knows without them. */
function inPlaceOf(sums, program = { first: '', scripts: [] }) {
  const modules = [
    [
      own('src/executable/sums.ts'),
      `export const SUMS = ${JSON.stringify(sums)};
       export const PROGRAM = ${JSON.stringify(program)};`,
    ],
    [
      own('src/config/version.ts'),
      `const origin = ${JSON.stringify(origin)};
       export const readOrigin = () => origin;
       export const readVersion = () => origin.version;`,
    ],
    [
      own('node_modules/zeromq/lib/load-addon.js'),
      `exports.__esModule = true;
       exports.default = require('./zeromq-addon').addon;`,
    ],
    [own('node_modules/undici/index.js'), UNDICI],
    [
      own(KUBERNETES),
      `import { runProgram } from ${JSON.stringify(join(root, 'src/executable/program.ts'))};
       export const { openSliceApi } = runProgram('kubernetes');`,
    ],
  ];
  return {
    name: 'in-place-of',
    setup: ({ onResolve, onLoad }) => {
      onResolve({ filter: /^\.\/zeromq-addon$/ }, ({ path }) => ({ path, external: true }));
      for (const [filter, contents] of modules)
        onLoad({ filter }, ({ path }) => ({
          contents,
          loader: 'js',
          resolveDir: path.includes('node_modules') ? dirname(path) : root,
        }));
    },
  };
}

/** How everything is bundled: for this Node, and as small as its readers allow. */
const BUNDLED = {
  absWorkingDir: root,
  bundle: true,
  metafile: true,
  platform: 'node',
  target: `node${process.versions.node}`,
  // A name in the stack of an error is worth its bytes; white space is not.
  minifyWhitespace: true,
  minifySyntax: true,
  // Read as Latin-1, the cheapest way to a string.
  charset: 'ascii',
  logLevel: 'warning',
};

async function bundle(entry, outfile, more = {}) {
  // One script: there are no other modules to load.
  const supported = { 'dynamic-import': false };
  const { metafile } = await build({ ...BUNDLED, entryPoints: [entry], outfile, format: 'cjs', supported, ...more });
  return metafile;
}

/** The texts of the program's scripts, and the module that it begins with. */
async function bundleProgram(sums) {
  const written = await build({
    ...BUNDLED,
    entryPoints: [PROGRAM],
    outdir: scratch,
    format: 'esm',
    splitting: true,
    write: false,
    plugins: [inPlaceOf(sums), nodeLater, packageLater, nodeNames],
  });
  // A module of its own, because a CommonJS one asks for it: esbuild would make all that it imports load late.
  const addon = file('zeromq-addon.cjs');
  await bundle('src/executable/zeromq.ts', addon, { plugins: [inPlaceOf(sums)] });
  const more = { 'zeromq-addon': readFileSync(addon, 'latin1') };
  return { inputs: written.metafile.inputs, ...splitProgram(written, PROGRAM, SCRIPTS, more) };
}

const sumsOf = (parts) =>
  Object.fromEntries(Object.entries(parts).map(([name, file]) => [name, crc32(readFileSync(file))]));

function run(command, args) {
  return execFileSync(command, args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'] });
}

try {
  mkdirSync(folder, { recursive: true });
  const parts = { zeromq: zeromqLibrary(), licenses: file('licenses') };
  const wrapped = { banner: { js: '(function(require,module,exports){' }, footer: { js: '})' } };
  parts.kubernetes = file('kubernetes.cjs');
  const { inputs } = await bundle(KUBERNETES, parts.kubernetes, wrapped);
  // What is in the bundle says whose licences are needed, and the bundle knows the sum of that text: so it is built twice.
  const bare = await bundleProgram({ none: 0 });
  writeFileSync(parts.licenses, licenseText(root, { inputs: { ...inputs, ...bare.inputs } }));
  const program = await bundleProgram(sumsOf(parts));
  const compiled = {};
  for (const [name, text] of Object.entries(program.scripts)) {
    compiled[name] = file(`${name}.cjs`);
    compiled[`code-${name}`] = file(`code-${name}`);
    writeFileSync(compiled[name], text);
  }
  run(process.execPath, [join(root, 'scripts', 'compiled-code.mjs'), program.first, ...Object.values(compiled)]);
  Object.assign(parts, compiled);
  const main = file('main.cjs');
  const known = inPlaceOf(sumsOf(compiled), { first: program.first, scripts: Object.keys(SCRIPTS) });
  await bundle('src/executable/main.ts', main, { plugins: [known] });
  const config = {
    main,
    output: file('baton'),
    assets: parts,
    useCodeCache: true,
    disableExperimentalSEAWarning: true,
  };
  writeFileSync(file('sea.json'), JSON.stringify(config));
  run(process.execPath, ['--build-sea', file('sea.json')]);
  const said = run(file('baton'), ['--version']);
  // Into its place in one step: whoever runs the one before keeps it.
  const place = join(folder, `.baton-${process.pid}`);
  run('cp', [file('baton'), place]);
  renameSync(place, join(folder, 'baton'));
  writeFileSync(join(folder, 'THIRD_PARTY_LICENSES'), readFileSync(parts.licenses));
  const megabytes = (statSync(join(folder, 'baton')).size / 2 ** 20).toFixed(0);
  process.stdout.write(`${join(folder, 'baton')}: ${megabytes} MiB, ${said}`);
} finally {
  rmSync(scratch, { recursive: true, force: true });
}
