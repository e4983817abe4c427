import { execFile } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, expect, test } from 'vitest';
import { Notices } from '../../src/engine/notices.ts';

const run = promisify(execFile);
const scratch = mkdtempSync(join(tmpdir(), 'baton-python-'));
afterAll(() => rmSync(scratch, { recursive: true, force: true }));

/** A Python that has msgspec and pyzmq: the machine's, or one of a virtual environment made for this test. */
async function findPython(): Promise<string | undefined> {
  const has = (python: string) =>
    run(python, ['-c', 'import msgspec, zmq']).then(
      () => true,
      () => false,
    );
  if (await has('python3')) return 'python3';
  try {
    await run('python3', ['-m', 'venv', join(scratch, 'venv')], { timeout: 30_000 });
    const python = join(scratch, 'venv', 'bin', 'python');
    if (!existsSync(python)) return undefined;
    await run(python, ['-m', 'pip', 'install', '--quiet', 'msgspec', 'pyzmq'], { timeout: 90_000 });
    return (await has(python)) ? python : undefined;
  } catch {
    return undefined;
  }
}

/** Both classes as LMCache declares them, pushed as its workers do; the ids are the arguments. */
const SCRIPT = `
import sys, msgspec, zmq
class ProxyNotif(msgspec.Struct, tag=True):
    req_id: str
class NixlProxyNotif(msgspec.Struct, tag=True):
    req_id: str
context = zmq.Context()
socket = context.socket(zmq.PUSH)
socket.connect(sys.argv[1])
for kind, req_id in ((ProxyNotif, sys.argv[2]), (NixlProxyNotif, sys.argv[3])):
    data = msgspec.msgpack.encode(kind(req_id=req_id))
    print(data.hex())
    socket.send(data)
socket.close()
context.term()
`;

test('a notice that msgspec and pyzmq send is accepted', { timeout: 150_000 }, async ({ skip }) => {
  const python = await findPython();
  if (python === undefined) {
    skip('no python3 with msgspec and pyzmq, and pip could not install them');
    return;
  }
  const results: string[] = [];
  await using notices = await Notices.open({ host: '127.0.0.1', port: 0, observe: (result) => results.push(result) });
  const ids = ['3f0c1a52-6f0e-4f3a-9a4a-9a1d2b7c5e10', '42'] as const;
  const waiters = ids.map((id) => notices.expect(id, 1));
  const args = ['-c', SCRIPT, `tcp://${notices.address}`, ...ids];
  const { stdout } = await run(python, args, { timeout: 20_000 });
  await Promise.all(waiters.map(({ arrived }) => arrived));
  expect(results).toEqual(['matched', 'matched']);
  expect(stdout.split('\n').slice(0, 2)).toEqual([
    '82a474797065aa50726f78794e6f746966a67265715f6964d92433663063316135322d366630652d346633612d396134612d396131643262376335653130',
    '82a474797065ae4e69786c50726f78794e6f746966a67265715f6964a23432',
  ]);
});
