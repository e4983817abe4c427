import type { Draw } from './property-requests.ts';

/** Bytes that parsers trip over. */
const ODD: readonly [string, ...string[]] = [
  '\r\n',
  '\r\n\r\n',
  '\n',
  '\0',
  ' ',
  ':',
  '"',
  '\\',
  '\\u0000',
  '\\ud800',
  '{',
  '}',
  '[',
  ']',
  ',',
  '-1',
  '0',
  '1e999',
  '18446744073709551616',
  'null',
  '%',
  '%00',
  '\u00ff',
  '\u0080',
  'chunked',
  'Transfer-Encoding: chunked\r\n',
  'Content-Length: 3\r\n',
  'Expect: 100-continue\r\n',
  'Connection: upgrade\r\nUpgrade: h2c\r\n',
  'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n',
  '\u0016\u0003\u0001',
];

/** Changes bytes in one to four places: other bits, odd bytes, less, more, or some of them twice. */
export function mutate(draw: Draw, bytes: Buffer): Buffer {
  let changed = Buffer.from(bytes);
  for (let left = draw.int(1, 4); left > 0; left--) {
    const at = draw.int(0, changed.length);
    const end = Math.min(changed.length, at + draw.int(0, 40));
    const [head, part, tail] = [changed.subarray(0, at), changed.subarray(at, end), changed.subarray(end)];
    const change = draw.pick<() => readonly Buffer[]>([
      () => [head, Buffer.from(part.map((byte) => byte ^ (1 << draw.int(0, 7)))), tail],
      () => [head, Buffer.from(draw.pick(ODD), 'latin1'), tail],
      () => [head, Buffer.from(draw.pick(ODD), 'latin1'), part, tail],
      () => [head, tail],
      () => [head, part, part, tail],
      () => [head, Buffer.alloc(draw.pick([1, 100, 5000]), draw.int(0, 255)), part, tail],
      () => [head],
    ]);
    changed = Buffer.concat(change());
  }
  return changed;
}

/** A value of JSON as no client should send it. */
export function drawJson(draw: Draw, depth = 0): string {
  if (depth > 4 || draw.chance(0.4)) {
    return draw.pick([
      'null',
      'true',
      '0',
      '-0.0',
      '1e400',
      '12345678901234567890',
      '""',
      '"\\ud800"',
      '"\\u0000"',
      `"${'x'.repeat(draw.int(0, 300))}"`,
      '"é\u{1f600}"',
      '[]',
      '{}',
    ]);
  }
  const items = Array.from({ length: draw.int(0, 4) }, () => drawJson(draw, depth + 1));
  if (draw.chance(0.5)) return `[${items.join(',')}]`;
  return `{${items.map((item) => `${JSON.stringify(draw.pick(MEMBERS))}:${item}`).join(',')}}`;
}

/** Members that baton or engines know, and some that nobody does. */
export const MEMBERS: readonly [string, ...string[]] = [
  'model',
  'messages',
  'prompt',
  'stream',
  'stream_options',
  'max_tokens',
  'max_completion_tokens',
  'n',
  'kv_transfer_params',
  'conversation_id',
  'session_id',
  'vllm_xargs',
  'prompt_cache_key',
  'priority',
  'logprobs',
  'tools',
  'role',
  'content',
  '__proto__',
  'constructor',
  '',
];
