import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { setTimeout } from 'node:timers/promises';
import { STUB_MODEL } from './stub-engine.ts';

/** Clients that mean harm, until they are disposed of. */
export interface Hostile extends AsyncDisposable {
  /** Connections that are open. */
  readonly open: () => number;
}

/** What each of them does with its connection until that is closed; then it comes again. */
type Conduct = (socket: Socket, isOver: () => boolean) => Promise<void>;

/** How many connect at a time. */
const BATCH = 200;

async function crowd(port: number, count: number, conduct: Conduct): Promise<Hostile> {
  const sockets = new Set<Socket>();
  let over = false;
  const comeOnce = async () => {
    const socket = connect(port, '127.0.0.1');
    const closed = new Promise<void>((resolve) => socket.once('close', () => resolve()));
    socket.on('error', () => undefined);
    await once(socket, 'connect').catch(() => undefined);
    if (over) socket.destroy();
    else sockets.add(socket);
    await Promise.race([conduct(socket, () => over || socket.destroyed), closed]);
    await closed;
    sockets.delete(socket);
  };
  const live = async () => {
    while (!over) await comeOnce();
  };
  const lives: Promise<void>[] = [];
  for (let begun = 0; begun < count; begun += BATCH) {
    const size = Math.min(BATCH, count - begun);
    lives.push(...Array.from({ length: size }, live));
    while (!over && sockets.size < begun + size * 0.9) await setTimeout(5);
  }
  return {
    open: () => sockets.size,
    async [Symbol.asyncDispose]() {
      over = true;
      for (const socket of sockets) socket.destroy();
      await Promise.all(lives);
    },
  };
}

const HEAD = 'GET /version HTTP/1.1\r\nhost: x\r\n';

/** Connections that carried one request and are kept. */
export const idlers = (port: number, count: number) =>
  crowd(port, count, async (socket) => {
    socket.resume().write(`${HEAD}\r\n`);
  });

/** Heads of requests that come a byte at a time. */
export const dribblers = (port: number, count: number) =>
  crowd(port, count, async (socket, isOver) => {
    socket.resume().write(`${HEAD}x-long: `);
    while (!isOver()) {
      socket.write('a');
      await setTimeout(250);
    }
  });

const BODY = JSON.stringify({ model: STUB_MODEL, stream: true, messages: [{ role: 'user', content: 'hi' }] });

/** Clients that ask for a stream and read nothing of it. */
export const nonReaders = (port: number, count: number) =>
  crowd(port, count, async (socket) => {
    socket.pause();
    socket.write(`POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: ${BODY.length}\r\n\r\n${BODY}`);
  });

/** Heads of the largest size that is taken, one after the other. */
export const headFloods = (port: number, count: number) =>
  crowd(port, count, async (socket, isOver) => {
    const head = `${HEAD}${Array.from({ length: 150 }, (_, i) => `x-${i}: ${'a'.repeat(200)}\r\n`).join('')}\r\n`;
    while (!isOver()) {
      socket.write(head);
      await once(socket, 'data').catch(() => undefined);
    }
  });

/** Milliseconds of requests one after the other, the quickest first; fails on one that is not answered well. */
export async function timesOf(url: string, count: number): Promise<readonly number[]> {
  const body = BODY.replace('"stream":true,', '');
  const times: number[] = [];
  for (let i = 0; i < count; i++) {
    const start = performance.now();
    const reply = await fetch(`${url}/v1/chat/completions`, { method: 'POST', body });
    await reply.text();
    if (reply.status !== 200) throw new Error(`status ${reply.status}`);
    times.push(performance.now() - start);
  }
  return times.toSorted((a, b) => a - b);
}

/** The value that a share of sorted ones does not exceed. */
export function quantile(sorted: readonly number[], share: number): number {
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))] ?? Number.NaN;
}
