import type { Command } from 'commander';
import { type BenchFlagValues, MULTI_TURN_FLAGS, SERVE_FLAGS } from '../bench/flags.ts';
import { addTable, readTable } from './flag-table.ts';

/** What `baton bench` is to do. */
export type BenchRequest =
  | { readonly action: 'serve' | 'multi-turn'; readonly flags: BenchFlagValues }
  | { readonly action: 'compare'; readonly files: readonly [string, string]; readonly plot: string | undefined };

const SERVE_HELP = `
One request after the other to an endpoint on this machine, twenty of them:
  baton bench serve --port 8000 --num-prompts 20 --max-concurrency 1
Ctrl-C ends it and prints what was measured until then. docs/benchmark.md tells what each figure means.
`;

const MULTI_TURN_HELP = `
Conversations of a file through baton, four at a time:
  baton bench multi-turn -i conversations.json -u http://127.0.0.1:8000 -p 4 --send-conversation-id
docs/benchmark.md has the form of the file.
`;

/** Adds `baton bench` and its commands. */
export function addBenchCommand(program: Command, run: (request: BenchRequest) => void): void {
  const bench = program
    .command('bench')
    .summary('measure an OpenAI endpoint')
    .description("Measures any OpenAI-compatible endpoint, with the flags and the reports of vLLM's benchmarks.");
  const serve = bench
    .command('serve')
    .summary('send requests, and print the report of vllm bench serve')
    .description('Sends streamed requests and prints the report of vllm bench serve, row for row.')
    .addHelpText('after', SERVE_HELP);
  addTable(serve, SERVE_FLAGS);
  serve.action((values: Readonly<Record<string, unknown>>) =>
    run({ action: 'serve', flags: readTable(SERVE_FLAGS, values) }),
  );
  const multiTurn = bench
    .command('multi-turn')
    .summary("hold conversations, and print the table of vLLM's multi-turn client")
    .description("Holds conversations and prints the table of vLLM's multi-turn client, and what reuse saved.")
    .addHelpText('after', MULTI_TURN_HELP);
  addTable(multiTurn, MULTI_TURN_FLAGS);
  multiTurn.action((values: Readonly<Record<string, unknown>>) =>
    run({ action: 'multi-turn', flags: readTable(MULTI_TURN_FLAGS, values) }),
  );
  bench
    .command('compare')
    .summary('lay two saved results beside each other')
    .description('Prints the figures of two saved results, and their differences with 95 % confidence intervals.')
    .argument('<a>', 'JSON of --save-result or --stats-json-output')
    .argument('<b>', 'what is compared with it')
    .option('--plot <file>', 'also draw both, as an SVG, or as a page where the name ends in .html')
    .action((a: string, b: string, { plot }: { readonly plot?: string }) =>
      run({ action: 'compare', files: [a, b], plot }),
    );
}
