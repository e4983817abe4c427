import { runBench } from '../../src/cli/bench-command.ts';
import { parseCommand } from '../../src/cli/parse-command.ts';

/** What a run of `baton bench` wrote. */
export interface BenchRan {
  readonly code: number;
  readonly out: string;
  readonly err: string;
}

/** Runs `baton bench ...` in this process as its command line says; it is told to stop when `stop` says so of its messages. */
export async function benchRun(
  words: readonly string[],
  stop: (err: string) => boolean = () => false,
): Promise<BenchRan> {
  const command = parseCommand(['bench', ...words], () => 'v');
  if (command.kind === 'usage') return { code: 2, out: '', err: command.message };
  if (command.kind !== 'bench') throw new Error(`baton bench became ${command.kind}`);
  const { promise, resolve } = Promise.withResolvers<void>();
  let out = '';
  let err = '';
  const host = {
    env: {},
    terminal: false,
    out: (text: string) => {
      out += text;
    },
    err: (text: string) => {
      err += text;
      if (stop(err)) resolve();
    },
    stopRequested: () => promise,
  };
  const code = await runBench(host, command.request);
  return { code, out, err };
}
