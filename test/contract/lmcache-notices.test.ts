import { describe, expect, test } from 'vitest';
import { Notices, readNotice } from '../../src/engine/notices.ts';
import { encodeNotice, NoticeSocket } from '../../src/sim/notice-socket.ts';

const hex = (text: string) => Uint8Array.from(Buffer.from(text, 'hex'));

describe('the bytes of a notice (LMCache 0.5.6, msgspec 0.23)', () => {
  test.each([
    ['82a474797065aa50726f78794e6f746966a67265715f6964a131', '1'],
    ['82a474797065aa50726f78794e6f746966a67265715f6964a23432', '42'],
    [
      '82a474797065aa50726f78794e6f746966a67265715f6964d92433663063316135322d366630652d346633612d396134612d396131643262376335653130',
      '3f0c1a52-6f0e-4f3a-9a4a-9a1d2b7c5e10',
    ],
  ])('%s tells of %s, and is what is written for it', (bytes, transferId) => {
    expect(readNotice(hex(bytes))).toEqual({ transferId });
    expect(Buffer.from(encodeNotice(transferId)).toString('hex')).toBe(bytes);
  });

  test('the older tag, with either name of the id', () => {
    const bytes = '82a474797065ae4e69786c50726f78794e6f746966a67265715f6964a131';
    expect(readNotice(hex(bytes))).toEqual({ transferId: '1' });
    expect(Buffer.from(encodeNotice('1', 'NixlProxyNotif')).toString('hex')).toBe(bytes);
    expect(readNotice(hex('82a474797065ae4e69786c50726f78794e6f746966a87265715f75756964a131'))).toEqual({
      transferId: '1',
    });
  });

  test.each([
    ['no type', '81a67265715f6964a131', 'ignored'],
    ['an id that is a number', '82a474797065aa50726f78794e6f746966a67265715f696401', 'ignored'],
    ['another class', '83a474797065ab43616e63656c4e6f746966a67265715f6964a131a46b65797390', 'ignored'],
    ['an unknown member besides', '83a178a179a474797065aa50726f78794e6f746966a67265715f6964a131', { transferId: '1' }],
    ['another order', '82a67265715f6964a131a474797065aa50726f78794e6f746966', { transferId: '1' }],
    ['no bytes', '', 'bad'],
    ['a list', '93010203', 'bad'],
    ['half a notice', '82a474797065aa5072', 'bad'],
    ['one and a half', '82a474797065aa50726f78794e6f746966a67265715f6964a131a1', 'bad'],
  ])('%s', (_name, bytes, want) => {
    expect(readNotice(hex(bytes))).toEqual(want);
  });
});

describe('Notices', () => {
  async function open() {
    const seen: string[] = [];
    const notices = await Notices.open({ host: 'localhost', port: 0, observe: (result) => seen.push(result) });
    return { notices, seen, socket: new NoticeSocket(`tcp://${notices.address}`) };
  }

  test('counts the notices of a transfer, and forgets it then', async () => {
    const { notices, seen, socket } = await open();
    await using _end = notices;
    const waiter = notices.expect('a', 2);
    await socket.send(encodeNotice('a'));
    await expect.poll(() => seen).toEqual(['matched']);
    expect(waiter.isComplete).toBe(false);
    await socket.send(encodeNotice('a'), encodeNotice('a'), Uint8Array.of(0xc1));
    await waiter.arrived;
    expect(waiter.isComplete).toBe(true);
    await expect.poll(() => seen).toEqual(['matched', 'matched', 'orphan', 'bad']);
    expect(notices.pending).toBe(0);
    socket.close();
  });

  test('none are wanted: complete at once; a cancelled transfer is nobody’s', async () => {
    const { notices, seen, socket } = await open();
    await using _end = notices;
    expect(notices.expect('x', 0).isComplete).toBe(true);
    notices.expect('y', 1).cancel();
    await socket.send(encodeNotice('y'));
    await expect.poll(() => seen).toEqual(['orphan']);
    socket.close();
  });

  test('closes while it waits', async () => {
    const { notices, socket } = await open();
    notices.expect('z', 1);
    await notices[Symbol.asyncDispose]();
    socket.close();
  });

  test('many notices at once', async () => {
    const { notices, socket } = await open();
    await using _end = notices;
    const ids = Array.from({ length: 5000 }, (_, i) => `t${i}`);
    const waiters = ids.map((id) => notices.expect(id, 1));
    for (const id of ids) void socket.send(encodeNotice(id));
    await Promise.all(waiters.map(({ arrived }) => arrived));
    expect(notices.pending).toBe(0);
    socket.close();
  });
});
