import { describe, expect, it } from 'vitest';
import { buildAccessRecord } from '../../src/obs/access-log.ts';
import { createLogger, errorFields, type LogFormat, type LogLevel, SILENT_LOGGER } from '../../src/obs/log.ts';
import { formatPretty } from '../../src/obs/log-pretty.ts';

function capture(format: LogFormat, level: LogLevel = 'info') {
  const lines: string[] = [];
  const log = createLogger({
    level,
    format,
    destination: { write: (line) => lines.push(line) },
    now: () => 1_700_000_000_123,
  });
  return { log, lines };
}

describe('createLogger', () => {
  it('writes one JSON object a line with level, time, fields and message', () => {
    const { log, lines } = capture('json');
    log.info({ instance: 'a:1', ports: [1, 2], revision: 12n, none: undefined }, 'hello');
    log.warn('plain');
    expect(lines.every((line) => line.endsWith('}\n'))).toBe(true);
    expect(lines.map((line) => JSON.parse(line))).toEqual([
      { level: 'info', time: '2023-11-14T22:13:20.123Z', instance: 'a:1', ports: [1, 2], revision: '12', msg: 'hello' },
      { level: 'warn', time: '2023-11-14T22:13:20.123Z', msg: 'plain' },
    ]);
  });

  it('keeps to its level and gives children their fields', () => {
    const { log, lines } = capture('json', 'warn');
    const child = log.child({ role: 'router' });
    child.info('quiet');
    child.error({ id: 'x' }, 'loud');
    expect(lines.map((line) => JSON.parse(line))).toMatchObject([
      { level: 'error', role: 'router', id: 'x', msg: 'loud' },
    ]);
    expect([log.isEnabled('info'), log.isEnabled('warn')]).toEqual([false, true]);
  });

  it('is silent at level silent', () => {
    const { log, lines } = capture('json', 'silent');
    log.fatal('x');
    SILENT_LOGGER.child({ a: 1 }).fatal('x');
    expect(lines).toEqual([]);
  });

  it('writes pretty lines that fields cannot forge', () => {
    const { log, lines } = capture('pretty');
    log.info({ model: 'a b\n22:13:20.123 ERROR forged \u001b[31m', n: 3 }, 'two\nlines');
    expect(lines).toEqual([
      '22:13:20.123 INFO  two\\u000alines model="a b\\n22:13:20.123 ERROR forged \\u001b[31m" n=3\n',
    ]);
  });
});

describe('formatPretty', () => {
  it('puts a stack below and leaves other text as it is', () => {
    const line = JSON.stringify({
      level: 'error',
      time: '2023-11-14T22:13:20.123Z',
      msg: 'bad',
      error_stack: 'Error: x\n    at f\n    at g',
    });
    expect(formatPretty(line, { color: false })).toBe('22:13:20.123 ERROR bad\n  at f\n  at g\n');
    expect(formatPretty(line, { color: true })).toContain('\u001b[31mERROR\u001b[39m');
    expect(formatPretty('not json\n', { color: false })).toBe('not json\n');
  });
});

describe('errorFields', () => {
  it('tells type, message, code and causes, and no other member', () => {
    const cause = new Error('socket closed');
    const error = Object.assign(new TypeError('failed', { cause }), {
      code: 'E_X',
      headers: { authorization: 'Bearer secret' },
      body: 'prompt',
    });
    const fields = errorFields(error);
    expect(fields).toMatchObject({
      error_type: 'TypeError',
      error_message: 'failed',
      error_code: 'E_X',
      error_causes: ['Error: socket closed'],
    });
    expect(JSON.stringify(fields)).not.toMatch(/secret|prompt/);
    expect(errorFields('a secret thrown as text')).toEqual({ error_type: 'string' });
  });
});

describe('buildAccessRecord', () => {
  it('has snake_case names and tenths of milliseconds', () => {
    const record = buildAccessRecord({
      requestId: 'r-1',
      api: 'chat.completions',
      tenant: 'team-a',
      model: 'm',
      stream: true,
      mode: 'prefill_decode',
      planReason: 'disaggregated',
      prefillInstance: 'p:1',
      decodeInstance: 'd:1',
      status: 200,
      prefillMs: 12.3456,
      ttftMs: 20,
      durationMs: 99.96,
      promptTokens: 7,
      completionTokens: 0,
      cachedTokens: undefined,
      retries: 0,
      ending: 'ok',
    });
    expect(record).toEqual({
      request_id: 'r-1',
      api: 'chat.completions',
      tenant: 'team-a',
      model: 'm',
      stream: true,
      mode: 'prefill_decode',
      plan_reason: 'disaggregated',
      prefill_instance: 'p:1',
      decode_instance: 'd:1',
      status: 200,
      prefill_ms: 12.3,
      ttft_ms: 20,
      duration_ms: 100,
      prompt_tokens: 7,
      completion_tokens: 0,
      retries: 0,
      ending: 'ok',
    });
    // The logger leaves out what is undefined.
    expect(record['cached_tokens']).toBeUndefined();
  });
});
