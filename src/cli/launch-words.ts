import { loadConfigFile } from '../config/load.ts';
import type { LoadInput } from '../config/load-config.ts';
import type { Problem } from '../config/problem.ts';
import type { LaunchPlan } from '../launch/plan.ts';
import { parseCommand } from './parse-command.ts';

/** What the commands of a plan are run with. */
export interface WordContext {
  /** The command that runs this baton, before the subcommand. */
  readonly self: readonly string[];
  readonly env: LoadInput['env'];
  readonly known: LoadInput['known'];
  /** True when the engines are processes of baton too. */
  readonly sim: boolean;
}

/**
 * What baton's own processes would say to the words that are passed on to them: their start would only fail later, baton's
 * when the engines have loaded. Words for vLLM are vLLM's to judge.
 */
export function findWordProblems(plan: LaunchPlan, context: WordContext): readonly Problem[] {
  const parse = (command: readonly string[]) => parseCommand(command.slice(context.self.length), () => '');
  const engines = (context.sim ? plan.engines : []).flatMap(({ name, command }): readonly Problem[] => {
    const parsed = parse(command);
    if (parsed.kind === 'sim') return [];
    return [{ where: '--engine-arg, or args in the topology file', message: `${name}: ${refusalOf(parsed)}` }];
  });
  const serve = parse(plan.proxy.command);
  if (serve.kind !== 'serve') return [...engines.slice(0, 1), { where: '--baton-arg', message: refusalOf(serve) }];
  const loaded = loadConfigFile({ flags: serve.flags, env: context.env, known: context.known, terminal: false });
  return [...engines.slice(0, 1), ...(loaded.kind === 'error' ? loaded.problems : [])];
}

function refusalOf(parsed: ReturnType<typeof parseCommand>): string {
  return parsed.kind === 'usage' ? parsed.message : 'a word makes the process print something and end; leave it out';
}
