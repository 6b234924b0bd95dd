"""Decides by its name whether a setting, parameter, header or variable holds a secret.

A name is read word by word. Words that speak of nothing else (`password`, `api_key`) count wherever they stand, unless
the name ends in what such a thing has (`_file`, `_env`, `_length`). Words that mean other things too (`token`, `pass`,
`session`) count at the end alone, and not after words of a model's tokens and of passes over data.
"""

import re

__all__ = ["is_ambiguous", "is_plain_number", "is_secret_header", "is_secret_name"]

_OWNERS = (
    r"api|app|application|access|private|priv|secret|signing|sign|encryption|decryption|crypto|cipher|shared|master|root"
    r"|subscription|functions?|account|license|service|service_account|host|admin|user|auth|client|deploy|ssh|tls|ssl|hmac|aes"
    r"|rsa|cert|ecdsa|ed25519|gpg|pgp|webhook|server|judge|gateway|azure|openai|anthropic|claude|google|gcp|gemini|mistral|groq"
    r"|together|fireworks|cohere|replicate|nvidia|openrouter|deepseek|wandb|mlflow|hf|aws|s3|minio|storage|github|gitlab|slack"
    r"|stripe|twilio|sendgrid|datadog|sentry|x"
)
_STRONG = (
    rf"(?:{_OWNERS})_?keys?|access_key_id|(?:secret|master|account)_?access_?keys?"
    r"|[a-z]*(?:password|passwd|passphrase|passcode|secret|credential)s?|passwort|kennwort|pass_(?:word|phrase)s?"
    r"|[a-z]*(?:apikey|privatekey|accesskey|secretkey|signingkey)s?|pkey|privkey|(?:ssl|tls|rsa|ssh)_private|id_(?:rsa|ecdsa|ed25519)"
    r"|creds?|(?:proxy_)?authorization|bearer|jwts?|t?otp|hmac|nkey|mnemonic|(?:seed|recovery|backup|mnemonic)_(?:phrase|words)"
    r"|dsn|connection_?str(?:ing)?s?|service_account_(?:json|info)|(?:git(?:hub|lab)|docker|azure|personal_access)_pat"
    r"|(?:access|refresh|auth|o?auth2?|bearer|api|id|session|csrf|xsrf|personal|hf|hub|gh|git(?:hub|lab)|bot|app|user|vault"
    r"|consul|slack|discord|telegram|wandb|mlflow|deploy|security|service|sas)_?tokens?"
    r"|(?:session|cookie)_?(?:id|key|cookie|secret)s?|phpsessid|jsessionid|(?:signed|presigned|sas|webhook|hook)_ur[li]s?"
)
_WEAK = (
    r"tokens?|toks?|pass(?:es)?|(?:db|user|admin|root|key|store|ldap|smtp|ftp|my)(?:pass|pwd|pw)|pwd|pw|auth|oauth2?|cookies?"
    r"|session|sid|pats?|pem|sas|signature|csrf|xsrf|pfx|p12|(?:slack|discord|teams)_hook|webhooks?"
)
_THINGS = (
    r"files?|path|folder|dir(?:ectory)?|env|environ(?:ment)?|vars?|variables?|names?|columns?|fields?|counts?|length|len|size"
    r"|bits|bytes|chars|types?|kinds?|modes?|methods?|required|enabled|allowed|timeout|ttl|minutes|hours|days|s|ms|ns"
    r"|seconds|rotation|max|min|limit|ur[li]|address|host|port|endpoint|provider|store|format|policy|regex|pattern|ratio"
    r"|rate|weights?|penalty|reward|ids?|level|index"
)
"""What a secret has and what says nothing of it, at the end of a name."""
_TAIL = r"(?:_(?:v?\d+|[a-z]|value|text|string|pem|der|hash|b64|base64|header|prod|dev|test|staging|eu|us|old|new))*"
_SECRET = re.compile(rf"(?:^|_)(?:{_STRONG})(?:\d+)?{_TAIL}$|(?:^|_)(?:(?:{_WEAK})\d*){_TAIL}$")
_CERTAIN = re.compile(rf"(?:^|_)(?:{_STRONG})(?:\d+)?(?:_|$)")
_WITHIN = re.compile(rf"(?:^|_)(?:{_STRONG})(?!.*_(?:{_THINGS})$)(?=_)")
_SELF = re.compile(r"(?:access|secret)_(?:key_)?id$|_(?:sessid|session_id)$|^session_id$|(?:signed|sas|hook)_ur[li]s?$")
"""Names that end in a thing and are secret all the same."""
_COUNTED = re.compile(
    r"(?:^|_)(?:max|min|longest|n|num|per|total|new|stop|stopping|top|pad|padding|eos|bos|unk|sep|separator|delimiter|cls"
    r"|mask|begin|start|end|first|last|next|final|turn|tool|call|image|audio|video|think|thinking|reasoning|special|added|extra"
    r"|prompt|completion|response|reply|answer|input|output|vocab|vocabulary|sequence|batch|budget|context|cached|loss|train"
    r"|trained|generated|sampled|draft|drafted|accepted|prefill|decode|speculative|assistant|vision|fim|boundary|masked|bad|banned|suppress|suppressed|forced|ignored|role|chat|text|control|newline|blank|model)"
    r"_(?:[a-z]+_)*tok(?:en)?s?(?:_text|_string|_value|_\d+)?$|^tokens$"
    r"|(?:^|_)(?:first|last|second|third|n|num|min|max|one|two|per|single|multi|forward|backward|each|every|by|must|can|did"
    r"|tests?|all|to|on|low|high|band|bi|of)_pass(?:es)?$|^pass(?:es)?$|(?:^|_)per_(?:token|session)s?$"
)
"""Names of numbers and kinds of a model's tokens, and of passes."""
_METRIC = re.compile(r"(?:^|[^A-Za-z0-9])pass@(?:k|\d+)$")
_NUMBERS = re.compile(r"(?:^|_)(?:session|pass|passes|auth|cookies?|sid|signature)$|tokens$")
_HEADER = re.compile(
    r".*[-_].*|apikey|authorization|cookie|pass(?:word|wd|phrase)|pwd|secret|credentials?", re.IGNORECASE
)
_MAX_CHARS = 200
"""The end of a name that is read: no setting has a longer name."""


def is_secret_name(name: str) -> bool:
    """Return whether a setting, parameter, header or variable of this name holds a secret."""
    plain = _plain(name)
    if _COUNTED.search(plain) is not None or _METRIC.search(name) is not None:
        return False
    return any(pattern.search(plain) is not None for pattern in (_SECRET, _WITHIN, _SELF))


def is_secret_header(name: str) -> bool:
    """Return whether `name: ` before a text makes it a secret: not in prose, as "an unknown token: x"."""
    return _HEADER.fullmatch(name) is not None and is_secret_name(name)


def is_ambiguous(name: str) -> bool:
    """Return whether a secret name may mean something else: a plain word under it need be no secret."""
    return _CERTAIN.search(_plain(name)) is None


def is_plain_number(name: str) -> bool:
    """Return whether a number of this secret name is a number all the same: of tokens, sessions or passes."""
    return _NUMBERS.search(_plain(name)) is not None


def _plain(name: str) -> str:
    """Return the last part of a dotted name in lower case, its words joined by underscores."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.rpartition(".")[2][-_MAX_CHARS:])
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
