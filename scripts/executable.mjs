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

const root = join(import.meta.dirname, '..');
const folder = resolve(process.argv[2] ?? join(root, 'dist'));
const scratch = mkdtempSync(join(tmpdir(), 'baton-executable-'));
const origin = readOrigin();

/** The library of zeromq that this Node loads; the package has one for each system. */
function zeromqLibrary() {
  const require = createRequire(import.meta.url);
  require('zeromq');
  const found = Object.keys(require.cache).filter((path) => path.endsWith('.node'));
  if (found.length !== 1) throw new Error(`expected zeromq to load one library, found ${found.join(', ')}`);
  return found[0];
}

const own = (path) => new RegExp(`/${path.replaceAll(/[/.]/g, '[/.]')}$`);

/** undici loads all that it has with its index; baton needs two of its classes, and gets no other name here. */
const UNDICI = `
import Dispatcher from './lib/dispatcher/dispatcher.js';
import api from './lib/api/index.js';
Object.assign(Dispatcher.prototype, api);
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

/** Puts in the place of modules that read files beside themselves what the executable knows without them. */
function inPlaceOf(sums) {
  const modules = [
    [own('src/executable/sums.ts'), `export const SUMS = ${JSON.stringify(sums)};`],
    [
      own('src/config/version.ts'),
      `const origin = ${JSON.stringify(origin)};
       export const readOrigin = () => origin;
       export const readVersion = () => origin.version;`,
    ],
    [
      own('node_modules/zeromq/lib/load-addon.js'),
      `export { addon as default } from ${JSON.stringify(join(root, 'src/executable/zeromq.ts'))};`,
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
    setup: ({ onLoad }) => {
      for (const [filter, contents] of modules)
        onLoad({ filter }, ({ path }) => ({
          contents,
          loader: 'js',
          resolveDir: path.includes('node_modules') ? dirname(path) : root,
        }));
    },
  };
}

async function bundle(entry, sums, outfile, more = {}) {
  const { metafile } = await build({
    absWorkingDir: root,
    entryPoints: [entry],
    outfile,
    bundle: true,
    metafile: true,
    platform: 'node',
    target: `node${process.versions.node}`,
    format: 'cjs',
    // A name in the stack of an error is worth its bytes; white space is not.
    minifyWhitespace: true,
    minifySyntax: true,
    // One script: there are no other modules to load.
    supported: { 'dynamic-import': false },
    // Read as Latin-1, the cheapest way to a string.
    charset: 'ascii',
    logLevel: 'warning',
    ...(sums === undefined ? {} : { plugins: [inPlaceOf(sums), nodeLater] }),
    ...more,
  });
  return metafile;
}

const sumsOf = (parts) =>
  Object.fromEntries(Object.entries(parts).map(([name, file]) => [name, crc32(readFileSync(file))]));

function run(command, args) {
  return execFileSync(command, args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'] });
}

try {
  mkdirSync(folder, { recursive: true });
  const file = (name) => join(scratch, name);
  const parts = { zeromq: zeromqLibrary(), licenses: file('licenses') };
  const wrapped = { banner: { js: '(function(require,module,exports){' }, footer: { js: '})' } };
  parts.kubernetes = file('kubernetes.cjs');
  const { inputs } = await bundle(KUBERNETES, undefined, parts.kubernetes, wrapped);
  // What is in the bundle says whose licences are needed, and the bundle knows the sum of that text: so it is built twice.
  const first = await bundle('src/bin.ts', { none: 0 }, file('first.cjs'));
  writeFileSync(parts.licenses, licenseText(root, { inputs: { ...inputs, ...first.inputs } }));
  const { ...known } = parts;
  parts.program = file('program.cjs');
  await bundle('src/bin.ts', sumsOf(known), parts.program, wrapped);
  parts.code = file('code');
  run(process.execPath, [join(root, 'scripts', 'compiled-code.mjs'), parts.program, parts.code]);
  const main = file('main.cjs');
  await bundle('src/executable/main.ts', sumsOf({ program: parts.program, code: parts.code }), main);
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
