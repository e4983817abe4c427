import { Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { describe, expect, test } from 'vitest';
import { runnerOf, ScriptCall, wordsOf } from '../../src/stores/valkey/script-call.ts';

const RUNNER = runnerOf('evalsha', 'abc');
const call = (...args: ConstructorParameters<typeof ScriptCall>[3]) =>
  new ScriptCall(RUNNER, ['{p}:m', 'é'], wordsOf(['run', '']), args);

describe('a script call', () => {
  test('is written as the server reads it, whatever its words hold', () => {
    const bytes = Uint8Array.of(0, 13, 10, 255);
    const text = call('κλειδί', 12, bytes, '', new Uint8Array(0), 7).toWritable({}).toString('latin1');
    const words = [
      ['$7', 'evalsha', '$3', 'abc', '$1', '2', '$5', '{p}:m', '$2', Buffer.from('é').toString('latin1')],
      ['$3', 'run', '$0', ''],
      ['$12', Buffer.from('κλειδί').toString('latin1'), '$2', '12', '$4', '\0\r\n\xFF', '$0', '', '$0', '', '$1', '7'],
    ].flat();
    expect(text).toBe(`*13\r\n${words.join('\r\n')}\r\n`);
  });

  test('without bytes too', () => {
    expect(call('x').toWritable({}).toString()).toBe(
      '*8\r\n$7\r\nevalsha\r\n$3\r\nabc\r\n$1\r\n2\r\n$5\r\n{p}:m\r\n$2\r\né\r\n$3\r\nrun\r\n$0\r\n\r\n$1\r\nx\r\n',
    );
  });

  test('goes to the node that has its keys', () => {
    expect(new ScriptCall(RUNNER, ['{p}:m'], wordsOf([]), []).getSlot()).toBe(call().getSlot());
    expect(call().getKeys()).toEqual(['{p}:m', 'é']);
  });

  test('waits for the others of its turn, so that one write does for all', async () => {
    const socket = new Socket();
    call().toWritable(socket);
    call().toWritable(socket);
    expect(socket.writableCorked).toBe(1);
    await nextTurn();
    expect(socket.writableCorked).toBe(0);
  });

  test('fails when there is no answer in time', async () => {
    const late = call();
    late.setTimeout(1);
    await expect(late.answer()).rejects.toThrow('Command timed out');
    const answered = call();
    answered.setTimeout(1);
    answered.resolve([1]);
    expect(await answered.answer()).toEqual([1]);
  });
});
