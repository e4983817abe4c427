import { build, type Plugin } from 'esbuild';
import { expect, test } from 'vitest';

/** What is loaded later is no part of a start. */
const withoutLater: Plugin = {
  name: 'without-later',
  setup: ({ onResolve }) =>
    onResolve({ filter: /.*/ }, ({ kind, path }) =>
      kind === 'dynamic-import' ? { path: `later:${path}`, external: true } : undefined,
    ),
};

test('before the facade listens few packages are loaded, and no messages, stores or clients of engines', async () => {
  const { metafile } = await build({
    entryPoints: ['src/bin.ts', 'src/cli/run.ts', 'src/roles.ts'],
    outdir: 'none',
    bundle: true,
    write: false,
    metafile: true,
    platform: 'node',
    format: 'esm',
    packages: 'external',
    plugins: [withoutLater],
  });
  const files = Object.keys(metafile.inputs);
  expect(files).toEqual(expect.arrayContaining(['src/roles/front.ts', 'src/config/load.ts', 'src/http/facade.ts']));
  expect(files.filter((file) => /^gen\/|^src\/(stores|engine|rpc|connectors|policies|sim)\//.test(file))).toEqual([
    // Flags of `baton sim`.
    'src/sim/cli-options.ts',
  ]);
  const packages = Object.values(metafile.outputs).flatMap(({ imports }) => imports.map(({ path }) => path));
  const kept = new Set(packages.filter((path) => !/^(node|later):|^\.\.?\//.test(path)));
  expect([...kept].sort()).toEqual([
    '@whatwg-node/disposablestack',
    'commander',
    'fastify',
    'pino',
    'prom-client',
    'yaml',
    'zod',
  ]);
});
