import type { CliHost } from '../../src/cli/run.ts';

/** A command line in a process that is not there; what it writes is recorded, and it starts nothing. */
export function cliHost(argv: readonly string[], parts: Partial<CliHost> = {}) {
  const seen = { out: '', err: '' };
  const host: CliHost = {
    argv,
    env: {},
    origin: () => ({ version: '1.2.3', commit: 'c0ffee' }),
    licenses: () => undefined,
    nodeVersion: 'v0',
    self: ['baton'],
    terminal: false,
    readLine: async () => new Uint8Array(),
    out: (text) => {
      seen.out += text;
    },
    err: (text) => {
      seen.err += text;
    },
    start: () => Promise.reject(new Error('nothing is started')),
    stopRequested: async () => 'SIGINT',
    signalGroup: () => false,
    onHangUp: () => {},
    ...parts,
  };
  return { host, seen };
}
