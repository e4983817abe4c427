import { readdirSync } from 'node:fs';
import { expect, test } from 'vitest';

test('baton/proto has everything that is generated from proto/baton/v1', async () => {
  const entry = Object.keys(await import('../../src/proto.ts'));
  const folder = new URL('../../gen/baton/v1/', import.meta.url);
  const files = readdirSync(folder);
  const modules = await Promise.all(files.map((file) => import(new URL(file, folder).href)));
  const names = modules.flatMap((module) => Object.keys(module));
  expect(names.length).toBeGreaterThan(files.length);
  expect(entry).toEqual(expect.arrayContaining(names));
});
