import { connect } from 'node:net';
import { setTimeout } from 'node:timers/promises';
import { expect } from 'vitest';
import { memoryInUse } from '../support/heap.ts';
import { seeded } from '../support/seeded.ts';
import { Draw } from './property-requests.ts';

/** Clients at a time. */
const CLIENTS = 12;
/** How often the world is looked at while it is fuzzed. */
const ROUNDS = 4;
/** What the heap may have grown by over the second half, bytes: noise of it is below that. */
const MAX_GROWTH = 8 * 1024 * 1024;

/** What is fuzzed. */
export interface FuzzTarget {
  /** Sends one thing; tells what it saw that must not be, if anything. */
  readonly once: (draw: Draw) => Promise<string | undefined>;
  /** Fails unless everything works as it did before, and nothing of what was sent is still there. */
  readonly check: () => Promise<void>;
}

/** Sends things for so many seconds from several clients at once; `BATON_SEED` repeats what is sent. */
export async function runFuzz(seconds: number, seed: number, target: FuzzTarget): Promise<number> {
  const wrong: string[] = [];
  // What Node warns of, like a timer that nobody could mean, is as wrong as what a client sees.
  const warn = ({ name, message }: Error) => void wrong.push(`${name}: ${message}`);
  process.on('warning', warn);
  using _ = { [Symbol.dispose]: () => void process.off('warning', warn) };
  const heaps: number[] = [];
  let sent = 0;
  for (let round = 0; round < ROUNDS; round++) {
    const end = performance.now() + (seconds * 1000) / ROUNDS;
    const client = async (number: number) => {
      while (performance.now() < end && wrong.length < 10) {
        const index = sent++;
        const seen = await target.once(new Draw(seeded(seed + index * CLIENTS + number)));
        if (seen !== undefined) wrong.push(seen);
      }
    };
    await Promise.all(Array.from({ length: CLIENTS }, (_, number) => client(number)));
    expect(wrong).toEqual([]);
    await target.check();
    heaps.push(memoryInUse().heap);
  }
  const growth = (heaps.at(-1) ?? 0) - (heaps[ROUNDS / 2 - 1] ?? 0);
  expect(growth, `heap after each round: ${heaps.join(', ')}, ${sent} sent`).toBeLessThan(MAX_GROWTH);
  return sent;
}

/** Most time that an answer is waited for: then the client leaves, as clients do. */
const PATIENCE_MS = 400;

/** Sends bytes in pieces, ends, breaks off or waits, and gives what came back. */
export async function sendAnyhow(draw: Draw, port: number, bytes: Uint8Array): Promise<Buffer> {
  const socket = connect({ port, host: '127.0.0.1', allowHalfOpen: true });
  const chunks: Buffer[] = [];
  socket.on('data', (chunk: Buffer) => chunks.push(chunk));
  socket.on('error', () => undefined);
  const closed = new Promise<void>((resolve) => socket.once('close', () => resolve()));
  const ended = new Promise<void>((resolve) => socket.once('end', () => resolve()));
  let rest = bytes;
  for (let pieces = draw.pick([1, 1, 2, 5]); pieces > 1 && !socket.destroyed; pieces--) {
    const at = draw.int(0, rest.byteLength);
    socket.write(rest.subarray(0, at));
    rest = rest.subarray(at);
    await setTimeout(draw.int(0, 3));
  }
  const how = draw.pick(['end', 'wait', 'wait', 'reset', 'leave'] as const);
  if (how === 'end') socket.end(rest);
  else socket.write(rest);
  if (how === 'reset') socket.resetAndDestroy();
  if (how === 'end' || how === 'wait') await Promise.race([ended, closed, setTimeout(PATIENCE_MS)]);
  socket.destroy();
  await closed;
  return Buffer.concat(chunks);
}
