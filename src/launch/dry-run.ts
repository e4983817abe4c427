import type { LaunchPlan, ProcessSpec } from './plan.ts';

/** Writes a plan as text that a shell can run: every file, then every command with its variables. */
export function formatPlan(plan: LaunchPlan): string {
  const files = plan.files.map(({ path, text }) => `# ${path}\n${text}`);
  return [...files, ...[...plan.engines, plan.proxy].map(formatProcess)].join('\n');
}

function formatProcess({ name, command, env, logFile }: ProcessSpec): string {
  const variables = Object.entries(env).map(([key, value]) => `${key}=${quote(value)}`);
  const words = [...variables, command.map(quote).join(' ')].join(' \\\n  ');
  return `# ${name}\n${words} \\\n  > ${quote(logFile)} 2>&1\n`;
}

/** Quotes a word for a POSIX shell where it needs that. */
function quote(word: string): string {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}
