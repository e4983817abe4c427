import { chmodSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { crc32 } from 'node:zlib';
import { expect, onTestFinished, test } from 'vitest';
import { loadAddon } from '../../src/executable/addon.ts';
import { checkPart, IS_EXECUTABLE } from '../../src/executable/parts.ts';

test('a checkout is no executable', () => {
  expect(IS_EXECUTABLE).toBe(false);
});

test('a part is taken as it was built, and refused when a bit of it is not', () => {
  const part = Buffer.from('the part');
  const sums = { one: crc32(part) };
  checkPart('one', part, sums);
  part.writeUInt8(part.readUInt8(3) ^ 4, 3);
  expect(() => checkPart('one', part, sums)).toThrow(
    'this executable is damaged: its part one is not what was built; copy or download it again',
  );
  expect(() => checkPart('two', part, sums)).toThrow('its part two');
});

function emptyFolder(): string {
  const folder = mkdtempSync(join(tmpdir(), 'baton-addon-'));
  onTestFinished(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}

test('a library that cannot be loaded is told with the folder, and leaves nothing there', () => {
  const folder = emptyFolder();
  expect(() => loadAddon({ name: 'ZMQ', bytes: Buffer.from('no library'), folder })).toThrow(
    /^cannot load the ZMQ library from \S+ \([^\n]+\): set TMPDIR to a folder that can be written and may hold programs$/,
  );
  expect(readdirSync(folder)).toEqual([]);
});

test('a folder that is a file, or not there, is told', () => {
  const folder = emptyFolder();
  const file = join(folder, 'file');
  writeFileSync(file, '');
  chmodSync(file, 0o400);
  for (const [place, code] of [
    [file, 'ENOTDIR'],
    [join(folder, 'none'), 'ENOENT'],
  ] as const) {
    expect(() => loadAddon({ name: 'ZMQ', bytes: Buffer.alloc(1), folder: place })).toThrow(
      new RegExp(`^cannot write the ZMQ library to ${place} \\(${code}[^\\n]*\\): set TMPDIR`),
    );
  }
});
