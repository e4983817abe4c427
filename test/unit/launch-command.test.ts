import { describe, expect, test } from 'vitest';
import { type LaunchHost, launch } from '../../src/cli/launch-command.ts';
import type { LaunchFlagValues } from '../../src/launch/flags.ts';
import type { LaunchSystem } from '../../src/launch/system.ts';

const KNOWN = { policies: ['round_robin'], connectors: ['nixl', 'lmcache'], stores: ['memory'] };

/** A machine with `gpus` GPUs and free ports on which nothing can be started. */
function machine(gpus: number): LaunchSystem {
  return {
    run: async ([program]) => ({
      code: 0,
      stdout: program === 'nvidia-smi' ? Array.from({ length: gpus }, (_, i) => `${i}\n`).join('') : '',
    }),
    portIsFree: async () => true,
    exists: () => true,
    start: () => expect.unreachable('a process was started'),
    signalGroup: () => false,
    isReady: async () => false,
    write: () => expect.unreachable('a file was written'),
    tail: () => [],
    startReaper: () => expect.unreachable('the reaper was started'),
  };
}

/** The exit code and everything that `baton launch` wrote. */
async function run(flags: LaunchFlagValues, parts: Partial<LaunchHost> = {}, gpus = 0) {
  let out = '';
  let err = '';
  const host: LaunchHost = {
    self: ['node', 'bin.ts'],
    env: {},
    terminal: false,
    out: (text) => {
      out += text;
    },
    err: (text) => {
      err += text;
    },
    stopRequested: () => new Promise(() => {}),
    signalGroup: () => false,
    ...parts,
  };
  return { code: await launch(host, flags, KNOWN, machine(gpus)), out, err };
}

describe('a dry run', () => {
  test('without GPUs it shows those that would be used', async () => {
    const { code, out, err } = await run({ 'dry-run': 'true' });
    expect([code, err]).toEqual([0, '']);
    expect(out.match(/CUDA_VISIBLE_DEVICES=\d/g)).toEqual([0, 1, 2, 3].map((i) => `CUDA_VISIBLE_DEVICES=${i}`));
  });

  test.each([
    ['those that are visible', { CUDA_VISIBLE_DEVICES: '4,6' }, 8, 'found 2 (CUDA_VISIBLE_DEVICES)'],
    ['a variable that hides all', { CUDA_VISIBLE_DEVICES: '' }, 8, 'found 0 (CUDA_VISIBLE_DEVICES)'],
    ['those of the driver', {}, 3, 'found 3'],
  ])('too few GPUs are told: %s', async (_, env, gpus, found) => {
    expect(await run({ 'dry-run': 'true' }, { env }, gpus)).toEqual({
      code: 1,
      out: '',
      err: `baton launch needs 4 GPUs, ${found}; start fewer engines (--prefill, --decode), or use --device cpu or --sim\n`,
    });
  });

  test('engines that need no GPU do without', async () => {
    for (const flags of [{ sim: 'true' }, { device: 'cpu' }])
      expect(await run({ 'dry-run': 'true', ...flags }, { env: { CUDA_VISIBLE_DEVICES: '0' } })).toMatchObject({
        code: 0,
        err: '',
      });
  });
});

describe('words that are passed on', () => {
  test.each([
    [
      { sim: 'true', 'engine-arg': ['--no-such-option'] },
      /^--engine-arg, or args in the topology file: prefiller1: unknown option '--no-such-option'[^\n]*\n$/,
    ],
    [{ sim: 'true', 'engine-arg': ['--help'] }, /^--engine-arg, .*: prefiller1: a word makes the process print .*\n$/],
    [
      { sim: 'true', 'engine-arg': ['--block-size=x'] },
      /^--engine-arg, .*: prefiller1: --block-size must be a number\n$/,
    ],
    [{ 'baton-arg': ['--no-such-option'] }, /^--baton-arg: unknown option '--no-such-option'[^\n]*\n$/],
    [{ 'baton-arg': ['--log-level=debg'] }, /^--log-level: expected one of .*; did you mean debug\?\n$/],
    [{ 'baton-arg': ['--config', '/no/such.yaml'] }, /^--config: \/no\/such\.yaml does not exist\n$/],
  ] as const)('%j is told before anything is started, and in a dry run', async (flags, message) => {
    for (const more of [{}, { 'dry-run': 'true' }])
      expect(await run({ ...flags, ...more }, {}, 4)).toEqual({
        code: 2,
        out: '',
        err: expect.stringMatching(message),
      });
  });

  test("words for vLLM are vLLM's to judge", async () => {
    const flags = { 'dry-run': 'true', 'engine-arg': ['--no-such-option'], 'baton-arg': ['--log-level=debug'] };
    expect(await run(flags)).toMatchObject({ code: 0, err: '' });
  });
});

test('a request to stop that came before the start starts nothing', async () => {
  expect(await run({ sim: 'true' }, { stopRequested: async () => {} })).toEqual({
    code: 0,
    out: '',
    err: 'stopping; nothing was started\n',
  });
});
