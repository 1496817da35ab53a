"""Names of splits: which folder names mean training, validation or test pictures."""

import re
import unicodedata
from typing import Final

TRAIN: Final = "train"
VALIDATION: Final = "validation"
TEST: Final = "test"

# Words in a folder's name that mean a split, without accents and in lower case.
_TRAIN_WORDS: Final = """
    train training trainings trn tr trainval learn learning lernen lern entrainement apprentissage
    entrenamiento aprendizaje addestramento treino treinamento обучение 训练 訓練 学習 훈련
    trening treningowy treningowe trenovaci traning utbildning egitim обучающая тренировка
    тренировочная навчання тренування تدريب אימון
"""
_VALIDATION_WORDS: Final = """
    val valid validate validation validating vali dev devel development validierung validacion
    validacao validazione валидация 验证 驗證 検証 검증
    walidacja walidacyjny walidacyjne validacni validering validatie convalida verifica dogrulama
    валідація валидационная تحقق תיקוף
"""
_TEST_WORDS: Final = """
    test tests testing tst te eval evaluate evaluation holdout heldout prufung pruefung essai prueba
    pruebas evaluacion teste prova тест 测试 測試 评估 テスト
    테스트 시험 testowy testowe testovaci тестовая тестирование тестування اختبار בדיקה
"""
_WORDS: Final = {
    TRAIN: frozenset(_TRAIN_WORDS.split()),
    VALIDATION: frozenset(_VALIDATION_WORDS.split()),
    TEST: frozenset(_TEST_WORDS.split()),
}
_ENDINGS: Final = re.compile(
    r"(?<=..)(set|data|dataset|split|images|imgs|pictures|集|s?(daten|satz|bilder|menge))$"
)
# Words in the name of a folder with unlabelled pictures, next to splits.
_UNLABELLED: Final = frozenset(
    {"pred", "predict", "prediction", "unlabeled", "unlabelled", "inference", "unknown"}
)


def role_of(name: str) -> str | None:
    """Return the split that a folder's name means (`seg_train`, `Testing`, `验证集`), or None."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", plain)
    words = re.findall(r"[^\W\d_]+", unicodedata.normalize("NFC", spaced).casefold())
    whole = "".join(words)
    for candidates in ([whole], words):
        bare = {_ENDINGS.sub("", word) for word in candidates} | set(candidates)
        roles = [role for role, known in _WORDS.items() if bare & known]
        if len(roles) == 1:
            return roles[0]
    return None


def is_unlabelled(name: str) -> bool:
    """Return whether a folder's name means unlabelled pictures."""
    return bool(set(re.findall(r"[a-z]+", name.casefold())) & _UNLABELLED)
