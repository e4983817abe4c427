import { describe, expect, test } from 'vitest';
import { BufferAdmission, type BufferTicket } from '../../src/services/buffer-admission.ts';

const never = new AbortController().signal;

function admission(slots = 4) {
  return new BufferAdmission({ chunkTokens: 256, slotsOf: () => slots });
}

function releaseOf(ticket: BufferTicket): () => void {
  if (ticket.kind !== 'taken') throw new Error(ticket.kind);
  return ticket.release;
}

describe('BufferAdmission', () => {
  test('counts whole chunks, for each instance by itself', async () => {
    const buffers = admission();
    const release = releaseOf(await buffers.take('d0', 257, never, 0));
    await buffers.take('d1', 1, never, 0);
    expect([buffers.used('d0'), buffers.used('d1'), buffers.used('d2')]).toEqual([2, 1, 0]);
    release();
    release();
    expect(buffers.used('d0')).toBe(0);
  });

  test('requests wait in order of arrival: a small one does not overtake a large one', async () => {
    const buffers = admission();
    const first = releaseOf(await buffers.take('d', 600, never, 0));
    const order: string[] = [];
    const large = buffers.take('d', 1024, never, 0).then((ticket) => {
      order.push('large');
      return releaseOf(ticket);
    });
    const small = buffers.take('d', 1, never, 0).then(() => order.push('small'));
    await Promise.resolve();
    expect(order).toEqual([]);
    first();
    (await large)();
    await small;
    expect(order).toEqual(['large', 'small']);
  });

  test('a prompt that never fits is told at once', async () => {
    expect(await admission().take('d', 1025, never, 0)).toEqual({ kind: 'too_large' });
  });

  test('who gives up makes room for those behind', async () => {
    const buffers = admission();
    await buffers.take('d', 768, never, 0);
    const client = new AbortController();
    const large = buffers.take('d', 512, client.signal, 0);
    const small = buffers.take('d', 256, never, 0);
    client.abort();
    expect(await large).toEqual({ kind: 'gone' });
    expect((await small).kind).toBe('taken');
    expect(await buffers.take('d', 1, never, 1)).toEqual({ kind: 'timeout' });
    expect(await buffers.take('d', 1, client.signal, 0)).toEqual({ kind: 'gone' });
  });
});
