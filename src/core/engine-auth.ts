/** `--engine-auth`: what becomes of Authorization on the way to an engine. */
export type EngineAuthMode = 'auto' | 'replace' | 'forward' | 'strip';

/** What the decision depends on. */
export interface EngineAuthInput {
  readonly mode: EngineAuthMode;
  /** Key of the instance's pool, or OPENAI_API_KEY. */
  readonly engineKey: string | undefined;
  /** The client's Authorization header. */
  readonly clientAuthorization: string | undefined;
  /** True when baton checks clients' credentials itself: then they are not the engines' business. */
  readonly batonAuthenticates: boolean;
}

/** The Authorization header of a leg and whose credential it is. */
export interface EngineAuthDecision {
  readonly authorization: string | undefined;
  readonly auth: 'own' | 'client' | 'none';
}

/** Decides the credential of a leg; `auto` is what the example proxies do: baton's key where there is one. */
export function decideEngineAuth(input: EngineAuthInput): EngineAuthDecision {
  const { mode, engineKey, clientAuthorization, batonAuthenticates } = input;
  const own = engineKey !== undefined && engineKey !== '';
  const chosen = mode !== 'auto' ? mode : own ? 'replace' : batonAuthenticates ? 'strip' : 'forward';
  if (chosen === 'replace' && own) return { authorization: `Bearer ${engineKey}`, auth: 'own' };
  if (chosen === 'forward' && clientAuthorization !== undefined) {
    return { authorization: clientAuthorization, auth: 'client' };
  }
  return { authorization: undefined, auth: 'none' };
}
