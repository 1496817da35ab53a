"""The settings of teaching."""

from pydantic import BaseModel, Field

from service.setting_values import Folder


class TeachSettings(BaseModel):
    """Fields that join `service.settings.Settings`."""

    teach: Folder = Field(
        None,
        description="folder of taught heads, created if absent; unset: no heads are taught. See "
        "docs/teach.md",
    )
    teach_thumbnails: bool = Field(
        False,
        description="keep each example's file name and a picture of 64 pixels for the page; "
        "else only the picture's features are kept. `make run` sets it",
    )
