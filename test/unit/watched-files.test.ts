import { rmSync, writeFileSync } from 'node:fs';
import { mkdtemp } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { createLogger } from '../../src/obs/log.ts';
import { StartError } from '../../src/roles/listen.ts';
import { watchFiles } from '../../src/roles/watched-files.ts';
import { waitUntil } from '../support/wait.ts';

/** A watched file whose text must not be `bad`, nor, by a fault of ours, `fault`. */
async function watched() {
  const directory = await mkdtemp(join(tmpdir(), 'baton-watched-'));
  onTestFinished(() => rmSync(directory, { recursive: true, force: true }));
  const path = join(directory, 'token');
  writeFileSync(path, 'first');
  const lines: string[] = [];
  const log = createLogger({ level: 'info', format: 'json', destination: { write: (line) => lines.push(line) } });
  const file = watchFiles({
    files: [{ name: 'rpc_client.token_file', path }],
    make: ([text = '']) => {
      if (text === 'bad') throw new StartError('the file holds a slip');
      if (text === 'fault') throw new TypeError('a fault');
      return text;
    },
    log,
    intervalMs: 5,
  });
  onTestFinished(() => file[Symbol.dispose]());
  const said = async () => {
    await waitUntil(() => lines.length > 0);
    return lines.splice(0).map((line): unknown => JSON.parse(line));
  };
  return { file, path, said };
}

const KEPT = { level: 'error', files: 'rpc_client.token_file', msg: expect.stringContaining('the old content stays') };

test('a slip in a changed file is said in words, without a stack, and the old content stays', async () => {
  const { file, path, said } = await watched();
  writeFileSync(path, 'bad');
  const [line, ...others] = await said();
  expect(line).toMatchObject({ ...KEPT, cause: 'the file holds a slip' });
  expect(JSON.stringify([line, others])).not.toContain('stack');
  expect(file.current).toBe('first');
  rmSync(path);
  expect(await said()).toEqual([expect.objectContaining({ ...KEPT, cause: `${path} does not exist` })]);
  writeFileSync(path, 'second');
  await waitUntil(() => file.current === 'second');
});

test('a fault of ours keeps its stack', async () => {
  const { path, said } = await watched();
  writeFileSync(path, 'fault');
  expect(JSON.stringify(await said())).toMatch(/TypeError.*watched-files\.test/);
});
